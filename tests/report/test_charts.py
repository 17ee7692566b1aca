"""Charts show the numbers they are given, at any length, and let no text become markup."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from salience.report.charts import HEIGHT, LEFT, RIGHT, WIDTH, Chart, bars, columns, lines, ticks


def drawn(chart: Chart, tag: str) -> list[ElementTree.Element]:
    return list(ElementTree.fromstring(chart.svg).iter(tag))


def plain(value: float) -> str:
    return f"{value:g}"


@pytest.mark.parametrize(
    ("low", "high", "wanted"),
    [
        (0, 10, [0, 2, 4, 6, 8, 10]),
        (0, 0.83, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (0.15, 0.87, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (3, 3, [3, 4, 5, 6]),
        (0, 0, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
    ],
)
def test_ticks_are_round_numbers_around_the_values(low, high, wanted):
    found = ticks(low, high)
    assert found == pytest.approx(wanted)
    assert found[0] <= low <= high <= found[-1]


def test_columns_are_as_high_as_their_values_and_stand_on_each_other():
    chart = columns("t", ["a", "b"], {"x": [1, 2], "y": [3, None]}, x_label="of", form=plain)
    one, two, above = drawn(chart, "rect")
    heights = [float(rect.attrib["height"]) for rect in (one, above, two)]
    assert [h / heights[0] for h in heights] == pytest.approx([1, 3, 2], abs=0.01)
    assert float(above.attrib["y"]) + heights[1] == pytest.approx(float(one.attrib["y"]), abs=0.02)
    assert chart.rows == (("a", "1", "3"), ("b", "2", "-"))
    assert chart.legend == ("x", "y")


@pytest.mark.parametrize("count", [1, 2, 500])
def test_any_number_of_values_stays_inside_the_drawing(count):
    values = [i % 17 / 17 for i in range(count)]
    line = lines("t", list(map(float, range(count))), {"x": values}, x_label="of", form=plain)
    points = [p for one in drawn(line, "polyline") for p in one.attrib["points"].split()]
    assert len(points) == count
    names = [str(i) for i in range(count)]
    column = columns("t", names, {"x": values}, x_label="of", form=plain)
    around = [p for one in drawn(column, "polygon") for p in one.attrib["points"].split()]
    spots = [tuple(map(float, p.split(","))) for p in points + around]
    spots += [(float(r.attrib["x"]) + float(r.attrib["width"]), float(r.attrib["y"])) for r in drawn(column, "rect")]
    assert len(spots) == {1: 1, 2: 3, 500: 500 + 4 * 500}[count]  # the value 0 has no column
    assert all(LEFT <= x <= WIDTH - RIGHT + 0.1 and 0 <= y <= HEIGHT for x, y in spots)


def test_a_single_share_is_drawn_between_nothing_and_itself():
    chart = lines("t", [5.0], {"a": [0.8]}, x_label="epoch", form="{:.0%}".format)
    assert chart is not None
    assert ">80%<" in chart.svg
    assert ">0%<" in chart.svg
    assert ">100%<" not in chart.svg
    below = lines("t", [7.0, 8.0], {"a": [-2.0, -2.0]}, x_label="epoch", form="{:.0f}".format)
    assert below is not None
    assert ">0<" in below.svg
    assert ">1<" not in below.svg


def test_without_a_number_there_is_no_chart():
    assert lines("t", [], {"x": []}, x_label="of", form=plain) is None
    assert columns("t", ["a"], {"x": [None]}, x_label="of", form=plain) is None
    assert bars("t", [], {}, form=plain) is None


def test_a_line_leaves_out_what_is_missing():
    chart = lines("t", [1, 2, 3], {"x": [1, None, 3]}, x_label="of", form=plain)
    assert len(drawn(chart, "polyline")[0].attrib["points"].split()) == 2
    assert chart.rows[1] == ("2", "-")


def test_bars_are_as_long_as_their_values():
    chart = bars("t", ["a", "b"], {"x": [1, 4]}, form=plain)
    short, long = (float(rect.attrib["width"]) for rect in drawn(chart, "rect"))
    assert long / short == pytest.approx(4, abs=0.01)


def test_names_cannot_become_markup_and_charts_say_what_they_are():
    nasty = "</title><script>alert(1)</script>"
    series = {nasty: [1.0, 2.0], "y": [1.0, 2.0]}
    for chart in (
        lines(nasty, [0, 1], series, x_label=nasty, form=plain),
        columns(nasty, [nasty, "b"], series, x_label=nasty, form=plain),
        bars(nasty, [nasty, "b"], series, form=plain, what=nasty),
    ):
        root = ElementTree.fromstring(chart.svg)
        assert not drawn(chart, "script")
        assert (root.attrib["role"], root[0].tag, root[0].text, root[1].tag) == ("img", "title", nasty, "desc")
