"""From seconds to a verdict: the model stays in its bracket, ceilings are Amdahl's, the sentence names the right cause."""

from __future__ import annotations

import math

import pytest

from salience.events import StepCosts
from salience.watch.model import Lever, ceiling, combined, find_bottleneck, fitted, levers, more_workers


def costs(**changed) -> StepCosts:
    usual = {
        "step": 0.1, "wait": 0.03, "input": 0.09, "compute": 0.06, "work": {"fetch": 0.02, "decode": 0.14, "collate": 0.02},
        "forward": 0.02, "backward": 0.04, "workers": 2, "steps": 100,
    }  # fmt: skip
    return StepCosts(**{**usual, **changed})


@pytest.mark.parametrize(("d", "c"), [(1.0, 1.0), (0.2, 3.0), (5.0, 0.01)])
def test_the_model_lies_between_maximum_and_sum_and_is_fitted_to_the_measured_step(d, c):
    assert combined(d, c, 1.0) == pytest.approx(d + c)
    assert combined(d, c, 16.0) == pytest.approx(max(d, c), rel=0.05)
    for g in (1.0, 1.5, 3.0):
        assert fitted(combined(d, c, g), d, c) == pytest.approx(g, rel=0.05) or d / c > 100
    assert fitted(10 * (d + c), d, c) == 1.0  # slower than one after the other: something else
    assert fitted(0.5 * max(d, c), d, c) == 16.0


def test_a_ceiling_is_what_is_left_when_a_stage_costs_nothing():
    serial = costs(step=0.15, input=0.09, compute=0.06)
    everything = ceiling(serial, Lever(name="x", exact=True, saves={"input": 1.0}))
    assert everything.speedup == pytest.approx(0.15 / 0.06)
    decoding = ceiling(serial, Lever(name="x", exact=True, saves={"decode": 1.0}))
    assert decoding.speedup == pytest.approx(0.15 / (0.06 + 0.09 * 0.04 / 0.18))
    nothing = ceiling(serial, Lever(name="x", exact=True, saves={"fsync": 1.0}))
    assert nothing.speedup == pytest.approx(1.0)
    for found in (everything, decoding, nothing):
        assert found.low <= found.speedup <= found.high


def test_overlapped_input_behind_compute_has_nothing_to_gain():
    hidden = costs(step=0.1, wait=0.0, input=0.02, compute=0.1)
    found = ceiling(hidden, Lever(name="x", exact=True, saves={"input": 1.0}))
    assert found.speedup == pytest.approx(1.0, abs=0.02)
    assert find_bottleneck(hidden).bound == "compute"
    assert "Compute-bound" in find_bottleneck(hidden).text


@pytest.mark.parametrize(
    ("work", "cause"),
    [({"fetch": 0.3, "decode": 0.1}, "fetch"), ({"fetch": 0.01, "crop": 0.2, "decode": 0.1}, "crop")],
)
def test_the_sentence_names_the_stage_behind_the_wait(work, cause):
    found = find_bottleneck(costs(wait=0.05, work=work))
    assert (found.bound, found.cause) == ("input", cause)
    assert f"waits 50% of each step (utilisation 50%); {cause} causes" in found.text


def test_an_exact_lever_is_named_before_a_lossy_one():
    bound = costs(wait=0.05, work={"fetch": 0.3, "decode": 0.1})
    ceilings = [ceiling(bound, lever) for lever in levers(bound, cores=2)]
    assert {c.name for c in ceilings} >= {"cache=", 'select="io"', 'treat="reuse"', 'select="default"'}
    assert "Try: cache=" in find_bottleneck(bound, ceilings).text
    assert "num_workers" not in find_bottleneck(bound, ceilings).text  # there are no more cores


def test_waits_for_workers_that_are_far_ahead_are_no_verdict_on_the_input():
    found = find_bottleneck(costs(wait=0.03, compute=0.07, work={"load": 0.004}, workers=1))
    assert found.bound == "compute"
    assert "handing batches over" in found.text
    assert (
        find_bottleneck(costs(wait=0.03, compute=0.07, work={"load": 0.004}, workers=0)).bound == "input"
    )  # they are not beside


def test_gradients_that_ranks_wait_for_are_a_verdict_of_their_own():
    bound = costs(step=0.1, wait=0.01, input=0.001, compute=0.09, forward=0.01, backward=0.02, sync=0.06)
    ceilings = [ceiling(bound, lever) for lever in levers(bound, cores=1)]
    found = find_bottleneck(bound, ceilings)
    assert (found.bound, found.cause, found.share) == ("sync", "gradient sync", pytest.approx(0.6))
    assert "without that a step would take 40.0 ms" in found.text
    assert 'Try: salience.sync(mode="auto")' in found.text
    gain = next(one for one in ceilings if one.name == 'sync(mode="auto")')
    assert gain.low <= gain.speedup <= gain.high
    assert gain.high == pytest.approx(0.09 / 0.03)
    assert find_bottleneck(costs(step=0.1, wait=0.05, compute=0.05, sync=0.03)).bound == "input", "waits for input more"
    assert 'sync(mode="auto")' not in {lever.name for lever in levers(costs(), cores=1)}


def test_a_loop_that_is_slower_alone_promises_nothing():
    assert "cost nothing: 1.00x" in find_bottleneck(costs(step=0.1, wait=0.03, compute=0.12)).text


def test_as_many_workers_are_advised_as_keep_pace():
    lever = more_workers(costs(compute=0.06, work={"decode": 0.16}, workers=1), cores=8)
    assert lever is not None
    assert lever.name == "num_workers=3"
    assert more_workers(costs(compute=0.06, work={"decode": 0.16}, workers=3), cores=8) is None
    assert more_workers(costs(compute=0.0, work={"decode": 0.16}, workers=2), cores=2) is None


def test_between_the_bands_it_says_partly_and_zeroes_are_no_trouble():
    assert find_bottleneck(costs(wait=0.01)).bound == "mixed"
    empty = costs(step=0.0, wait=0.0, input=0.0, compute=0.0, work={}, forward=0.0, backward=0.0)
    assert find_bottleneck(empty).bound == "compute"
    assert math.isfinite(ceiling(empty, Lever(name="x", exact=True, saves={"input": 1.0})).speedup)
