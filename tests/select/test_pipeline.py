"""The framework: exact budgets, forced is forced, pure plans, failing plug-ins named and switched off."""

from __future__ import annotations

import numpy as np
import pytest

from salience.config import SelectConfig, Use
from salience.errors import ConfigError, PluginError
from salience.ledger import Ledger
from salience.select import Clock, Pipeline, Verdict, View, preset
from salience.select.curves import all_less_all, cosine, step
from salience.select.filters import age_cap, class_floor, tail
from salience.select.noise import Judgement
from salience.select.trial import AFTER, RESTS

N = 1000


def known(n: int = N) -> Ledger:
    ledger = Ledger(n)
    rng = np.random.default_rng(0)
    ledger.label[:] = rng.integers(0, 5, n)
    for window in range(3):
        ledger.record(np.arange(n), {"loss": rng.exponential(size=n).astype(np.float32)}, window=window)
    return ledger


def plan(pipeline: Pipeline, ledger: Ledger, window: int = 5, seed: int = 0):
    return pipeline.plan(ledger, window=window, windows=10, batch_size=10, seed=seed)


def test_the_default_prunes_exactly_what_its_curve_says():
    pipeline = Pipeline(preset("default"))
    sizes = [len(plan(pipeline, known(), window=w)) for w in range(10)]
    assert sizes == [1000, 1000, 500, 500, 500, 500, 500, 500, 500, 1000]
    assert sizes == [pipeline.budget(w, 10, N) for w in range(10)]


def test_a_plan_is_a_pure_function_of_ledger_config_seed_and_window():
    ledger = known()
    before = ledger.state_dict()
    a, b = (plan(Pipeline(preset("default")), ledger) for _ in range(2))
    np.testing.assert_array_equal(a.ids, b.ids)
    np.testing.assert_array_equal(a.weights, b.weights)
    assert not np.array_equal(a.ids, plan(Pipeline(preset("default")), ledger, seed=1).ids)
    assert not np.array_equal(a.ids, plan(Pipeline(preset("default")), ledger, window=6).ids)
    for name, column in before.items():
        np.testing.assert_array_equal(column, ledger.state_dict()[name])


def test_no_sample_is_planned_twice_and_hard_ones_are_preferred():
    ledger = known()
    ledger.trial = np.zeros((100, 6))  # hard samples that rested gained as much as the others
    ledger.trial[:, RESTS], ledger.trial[:, AFTER] = np.arange(100) % 2, 0.1
    made = plan(Pipeline(preset("default")), ledger)
    assert len(set(made.ids.tolist())) == len(made)
    assert ledger.mean_loss[made.ids].mean() > 1.1 * ledger.mean_loss.mean()


def test_the_suspicious_tail_is_left_out_until_its_age_brings_it_back():
    ledger = known()
    worst = np.argsort(-ledger.mean_loss)[:20]
    config = SelectConfig(
        filters=(Use(name="tail", options={"share": 0.02}), Use(name="age_cap", options={"windows": 6})),
        scores=(Use(name="ema_loss"),),
        sampler=Use(name="ratio", options={"explore": 0.0}),
        keep=Use(name="constant", options={"share": 0.4}),
    )
    assert not set(worst) & set(plan(Pipeline(config), ledger, window=5).ids.tolist())
    ledger.last_seen[:] = 7
    ledger.last_seen[worst] = 2
    assert set(worst) <= set(plan(Pipeline(config), ledger, window=8).ids.tolist())


def test_forced_is_forced_in_whatever_order_filters_are_written():
    def drop_even(view: View) -> Verdict:
        return Verdict(keep=np.arange(view.n) % 2 == 1, reason="even")

    def force_first(view: View) -> Verdict:
        return Verdict(force=np.arange(view.n) < 4, reason="first")

    def ids(*filters):
        config = SelectConfig(filters=tuple(Use(name=f) for f in filters), keep=Use(name="constant"))
        return plan(Pipeline(config), known()).ids.tolist()

    assert {0, 1, 2, 3} <= set(ids(drop_even, force_first))
    assert ids(force_first, drop_even) == ids(drop_even, force_first)
    assert {i for i in ids(force_first, drop_even) if i % 2 == 0} == {0, 2}


@pytest.mark.parametrize("order", [("class_floor", "noise"), ("noise", "class_floor")])
def test_a_class_that_looks_mislabelled_gets_its_floor_and_is_learnt(order):
    ledger = known()
    rare = np.arange(N) < 40
    ledger.label[rare] = 7
    ledger.last_seen[:] = 2  # by window 5 suspects have waited long enough to be looked at again, with weight 0
    wrong = np.where(rare, np.float32(0.9), np.float32(0.1))
    judged = Judgement(
        wrong=wrong, verdict="wrong labels", rate=0.2, evidence="", spared=np.zeros(N, dtype=bool), firm=True
    )
    config = SelectConfig(filters=tuple(Use(name=f) for f in order), keep=Use(name="constant"))
    made = Pipeline(config, strict=True).plan(ledger, window=5, windows=10, batch_size=10, seed=0, judged=judged)
    floor = class_floor(View(ledger, Clock(window=5, windows=10))).force & rare
    assert floor.sum() == 2
    weight = np.zeros(N)
    weight[made.ids] = made.weights
    assert (weight[floor] > 0).all()
    assert (weight[rare & ~floor] == 0).all()
    assert {note.name: note.dropped for note in made.notes}["noise"] == 40


@pytest.mark.parametrize("label", [np.arange(10_000) % 10, np.arange(10_000) // 1000], ids=["in turn", "sorted"])
def test_the_floor_of_large_classes_does_not_depend_on_where_they_lie(label):
    ledger = Ledger(10_000)
    ledger.label[:] = label
    forced = [class_floor(View(ledger, Clock(window=w, windows=20)), share=0.05).force for w in range(20)]
    by_class = np.array([np.bincount(label[force], minlength=10) for force in forced])
    assert abs(by_class.mean() - 50) < 3
    assert by_class.min() > 50 - 5 * 7  # binomial, sd 6.9
    assert (np.sum(forced, axis=0) == 1).all()  # everyone's turn comes once


def test_class_numbers_far_above_the_number_of_samples_cost_nothing():
    ledger = Ledger(1000)
    ledger.label[:] = np.arange(1000) % 7 * 300_000_000
    force = class_floor(View(ledger, Clock(window=0, windows=20)), share=0.05).force
    assert np.bincount(np.arange(1000)[force] % 7, minlength=7).tolist() == [8] * 7


def test_the_floor_gives_every_class_its_share_and_every_sample_its_turn():
    ledger = known()
    ledger.label[:10] = 7  # a rare class
    forced = np.zeros(N, dtype=int)
    for window in range(20):
        force = class_floor(View(ledger, Clock(window=window, windows=20)), share=0.05).force
        forced += force
        for c in (0, 1, 2, 3, 4, 7):
            members = ledger.label == c
            assert force[members].sum() == np.ceil(0.05 * members.sum())
    assert (forced >= 1).all()


def test_age_cap_forces_what_waited_too_long():
    ledger = known()
    ledger.last_seen[:5] = 0
    force = age_cap(View(ledger, Clock(window=10, windows=20)), windows=10).force
    assert np.flatnonzero(force).tolist() == [0, 1, 2, 3, 4]


def test_when_more_is_forced_than_fits_the_longest_waiting_go_first():
    ledger = known()
    ledger.last_seen[:] = 4
    ledger.last_seen[:100] = 0
    config = SelectConfig(
        filters=(Use(name="age_cap", options={"windows": 1}),), keep=Use(name="constant", options={"share": 0.2})
    )
    made = plan(Pipeline(config), ledger)
    assert len(made) == 200
    assert set(range(100)) <= set(made.ids.tolist())


def test_the_tail_does_nothing_in_windows_that_visit_everything():
    assert tail(View(known(), Clock(window=0, windows=10, keep=1.0)), share=0.1).keep is None


def test_curves_give_all_at_both_ends():
    shares = [all_less_all(Clock(window=w, windows=20), share=0.4, warmup=2, end=0.2) for w in range(20)]
    assert shares == [1.0] * 2 + [0.4] * 14 + [1.0] * 4
    assert [step(Clock(window=w, windows=8), share=0.5, end=0.125) for w in (0, 6, 7)] == [0.5, 0.5, 1.0]
    assert [round(cosine(Clock(window=w, windows=5), low=0.2), 3) for w in (0, 4)] == [1.0, 0.2]
    short = [all_less_all(Clock(window=w, windows=5), share=0.4) for w in range(5)]
    assert short == [1.0, 0.4, 0.4, 0.4, 1.0]


def broken(view: View) -> np.ndarray:
    raise RuntimeError("out of luck")


@pytest.mark.parametrize(
    ("score", "says"),
    [
        (broken, "RuntimeError: out of luck"),
        (lambda view: np.zeros(3), r"shape \(3,\)"),
        (lambda view: ["a"] * view.n, "one number per sample"),
    ],
)
def test_a_plug_in_that_fails_is_named_and_switched_off_or_raises_when_strict(score, says):
    said: list[str] = []
    config = SelectConfig(scores=(Use(name=score), Use(name="loss")), keep=Use(name="constant"))
    pipeline = Pipeline(config, warn=said.append)
    assert len(plan(pipeline, known())) == 500
    assert len(plan(pipeline, known())) == 500
    assert len(said) == 1
    with pytest.raises(PluginError, match=says):
        plan(Pipeline(config, strict=True), known())


def test_a_sampler_that_cheats_on_its_budget_is_switched_off():
    from salience.select import Draw

    def greedy(candidates, budget, rng):
        return Draw(positions=np.arange(budget + 1))

    said: list[str] = []
    config = SelectConfig(sampler=Use(name=greedy), keep=Use(name="constant"))
    assert len(plan(Pipeline(config, warn=said.append), known())) == 500
    assert "drew 501 samples for a budget of 500" in said[0]


def test_filters_that_leave_nothing_are_not_applied():
    said: list[str] = []
    config = SelectConfig(filters=(Use(name=lambda view: Verdict(keep=np.zeros(view.n, dtype=bool))),))
    assert len(plan(Pipeline(config, warn=said.append), known())) == N
    assert "left out every sample" in said[0]


def test_unknown_names_and_options_get_a_hint():
    with pytest.raises(PluginError, match="Did you mean 'ema_loss'"):
        Pipeline(SelectConfig(scores=(Use(name="ema_los"),)))
    with pytest.raises(ConfigError, match="Did you mean 'explore'"):
        Pipeline(SelectConfig(sampler=Use(name="ratio", options={"explor": 1})))
    with pytest.raises(ConfigError, match="Did you mean 'default'"):
        preset("defualt")
