"""Stated against true: the table, its largest gap and the picture."""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture(scope="module", autouse=True)
def importable() -> Iterator[None]:
    sys.path.insert(0, str(BENCHMARKS))
    yield
    sys.path.remove(str(BENCHMARKS))


def test_each_bin_has_what_was_stated_on_average_what_is_true_and_how_many():
    from reliability import reliability

    stated = np.array([0.05, 0.07, 0.55, 0.95, 1.0, np.nan])
    wrong = np.array([False, True, True, True, False, True])
    table = reliability(stated, wrong, bins=10)
    assert [count for _, _, count in table] == [2, 1, 2]
    assert table[0] == (pytest.approx(0.06), 0.5, 2)
    assert table[2] == (pytest.approx(0.975), 0.5, 2)


def test_probabilities_that_mean_what_they_say_lie_on_the_diagonal():
    from reliability import largest_gap, reliability

    rng = np.random.default_rng(0)
    stated = rng.random(200_000).astype(np.float32)
    assert largest_gap(reliability(stated, rng.random(200_000) < stated, bins=10)) < 0.02
    assert largest_gap(reliability(stated, rng.random(200_000) < stated**3, bins=10)) > 0.3


def test_bins_of_a_few_samples_do_not_count():
    from reliability import largest_gap, reliability

    assert largest_gap([(0.1, 0.1, 500), (0.9, 0.2, 49)]) == 0
    assert largest_gap([(0.9, 0.2, 50)]) == pytest.approx(0.7)
    assert reliability(np.full(3, np.nan), np.ones(3, dtype=bool)) == []


@pytest.mark.parametrize("table", [[(0.5, 0.4, 60)], [(0.05, 0.02, 900), (0.5, 0.6, 80), (0.96, 0.9, 120)]])
def test_the_picture_is_whole_and_carries_its_numbers(table):
    from reliability import reliability_chart, standalone

    chart = reliability_chart(table)
    assert len(chart.rows) == len(table)
    assert chart.head == ("stated", "truly wrong", "labels")
    drawn = ET.fromstring(standalone(chart))
    assert drawn.tag == "{http://www.w3.org/2000/svg}svg"
    assert len(drawn.findall(".//{*}circle")) == 2 * len(table)
