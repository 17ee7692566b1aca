"""Every part of a run can be made and used without a Loader."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from salience.config import SelectConfig, Use
from salience.errors import ConfigError, LossError, StateError
from salience.events import EventLog
from salience.plan import Plan
from salience.registry import card
from salience.run.copying import Copying
from salience.run.course import Course
from salience.run.order import PlainOrder
from salience.run.part import Batch, Setup, Voice
from salience.run.planning import Planning
from salience.run.recording import Recording
from salience.run.sensing import Sensing
from salience.select import Verdict, View

N = 40


def a_setup(**other) -> Setup:
    return Setup(**{"n": N, "batch_size": 8, "epochs": 6, "seed": 3, "drop_last": False, "ranks": None, **other})


def a_voice() -> Voice:
    return Voice(EventLog(), strict=False)


def a_plan(**other) -> Plan:
    ones = np.ones(N, dtype=np.float32)
    given = {"weights": ones, "importance": ones.copy(), "level": np.zeros(N, dtype=np.uint8), **other}
    return Plan(window=0, population=N, batch_size=8, drop_last=False, ids=np.arange(N), **given)


def test_planning_makes_the_plan_of_a_window_from_a_ledger_alone():
    recording = Recording(a_setup(), a_voice())
    planning = Planning(a_setup(), "uniform", a_voice())
    plan = planning.plan(recording.ledger, 2)
    assert len(plan) == 16, "half of 40 in whole batches of 8"
    again = Planning(a_setup(), "uniform", a_voice()).plan(recording.ledger, 2)
    np.testing.assert_array_equal(plan.ids, again.ids)


def test_planning_without_a_selection_plans_a_shuffle_of_everything():
    planning = Planning(a_setup(), None, a_voice())
    plan = planning.plan(Recording(a_setup(), a_voice()).ledger, 0)
    assert sorted(plan.ids) == list(range(N))
    assert planning.total_steps == 30


def test_recording_turns_losses_into_a_weighted_mean_and_a_ledger():
    recording, weights = Recording(a_setup(), a_voice()), np.linspace(0.5, 1.5, N, dtype=np.float32)
    recording.open(a_plan(weights=weights).shard(), frozenset())
    batch = Batch(0, 1, np.arange(8, 16))
    recording.hand_over(batch)
    losses = torch.arange(8.0)
    assert recording.batch_for_loss(None, again=False) is batch
    recording.record(batch, losses, None, None, None)
    mean = recording.weighted_mean(batch, losses, None, None)
    assert float(mean) == pytest.approx(float((losses.numpy() * weights[8:16]).sum() / 8), rel=1e-6)
    recording.flush(0)
    np.testing.assert_array_equal(recording.ledger.last_loss[8:16], losses.numpy())
    assert recording.ledger.seen.sum() == 8


def test_a_stand_in_for_a_broken_sample_has_weight_0():
    recording = Recording(a_setup(), a_voice())
    recording.open(a_plan().shard(), frozenset())
    batch = Batch(0, 0, np.arange(8), broken={3: "it cannot be read"})
    recording.hand_over(batch)
    mean = recording.weighted_mean(batch, torch.ones(8), None, None)
    assert float(mean) == pytest.approx(7 / 8)


def test_one_loss_per_batch_in_order():
    recording = Recording(a_setup(), a_voice())
    recording.open(a_plan().shard(), frozenset())
    first, second = Batch(0, 0, np.arange(8)), Batch(0, 1, np.arange(8, 16))
    recording.hand_over(first)
    recording.hand_over(second)
    with pytest.raises(LossError, match="the 1 before it got none"):
        recording.batch_for_loss(None, again=False)
    recording.skip()
    recording.hand_over(Batch(0, 2, np.arange(16, 24)))
    recording.record(recording.batch_for_loss(None, again=False), torch.ones(8), None, None, None)
    with pytest.raises(LossError, match="twice"):
        recording.batch_for_loss(None, again=False)
    assert recording.batch_for_loss(None, again=True).number == 2


def test_copying_finds_byte_copies_by_their_fingerprints():
    setup, voice = a_setup(), a_voice()
    planning = Planning(setup, {"preset": "uniform", "filters": [{"name": "redundancy"}]}, voice)
    copying = Copying(setup, voice, planning.pipeline)
    ids = np.arange(N)
    copying.hand_over(Batch(0, 0, ids, prints=np.where(ids < 2, 7, 100 + ids)))
    ledger = Recording(setup, voice).ledger
    ledger.set_labels(np.zeros(N, dtype=np.int32))
    copying.look(ledger, 0, last=True)
    assert copying.found is not None
    assert np.flatnonzero(copying.found.group >= 0).tolist() == [0, 1]


def test_copies_are_searched_for_where_any_plug_in_declares_that_it_needs_them():
    @card(needs=("copies",))
    def twins(view: View, *, visits: float = 2.0, fewest: int = 1) -> Verdict:
        return Verdict(reason=f"visits {visits}, fewest {fewest}")

    setup, voice = a_setup(), a_voice()
    needing = SelectConfig(filters=(Use(name=twins, options={"visits": 3.0, "fewest": 2}),))
    search = Copying(setup, voice, Planning(setup, needing, voice).pipeline).search
    assert search is not None
    assert search.next_look == 3.0
    assert Copying(setup, voice, Planning(setup, "uniform", voice).pipeline).search is None


def test_sensing_without_a_model_hands_batches_on_and_says_nothing():
    recording = Recording(a_setup(), a_voice())
    sensing = Sensing(a_setup(), a_voice(), recording.recorder)
    batch = Batch(0, 0, np.arange(8))
    sensing.hand_over(batch)
    sensing.on_loss(batch, torch.ones(8), None, None)
    assert sensing.reference is None
    assert sensing.state_dict() == {"proxy": None, "jury": None, "background": False}


def test_course_counts_visits_and_progress_over_windows():
    course, shard = Course(), a_plan().shard()
    course.begin(shard, later=N)
    assert (course.pending, course.progress, course.visits_expected) == (True, 0.0, 2 * N)
    for number in range(len(shard)):
        course.deliver(number)
    assert (course.complete, course.visits) == (True, N)
    course.end()
    assert (course.window, course.progress, course.open) == (1, 0.5, False)
    again = Course()
    again.load_state_dict(course.state_dict())
    assert again.state_dict() == course.state_dict()


def test_a_plain_order_goes_on_as_a_dataloader_that_was_iterated_in_vain():
    data = torch.utils.data.TensorDataset(torch.arange(N))
    plain = torch.utils.data.DataLoader(data, 8, shuffle=True, generator=torch.Generator().manual_seed(1))
    iter(plain)
    wanted = torch.cat([x for (x,) in plain]).tolist()
    order = PlainOrder(N, torch.Generator().manual_seed(1))
    order.draw(worker_seed=True)
    order.put_off()
    assert order.draw(worker_seed=True).tolist() == wanted


def test_an_order_that_was_put_off_is_drawn_anew_if_something_else_drew():
    order = PlainOrder(N, torch.Generator().manual_seed(1))
    for draws in (0, 1):
        order.draw(worker_seed=True)
        order.put_off()
        torch.rand(draws, generator=order.generator)
        assert order.begin() == (draws > 0)
    order.draw(worker_seed=True)
    assert not order.begin()
    assert order.begin(), "another iterator began with it"


@pytest.mark.parametrize("wrong", [{"n": 0}, {"batch_size": 0}, {"epochs": 0}, {"seed": -1}])
def test_a_setup_that_makes_no_sense_is_refused(wrong):
    with pytest.raises(ConfigError, match="must be at least"):
        a_setup(**wrong)


def test_a_state_of_the_old_layout_gets_one_clear_sentence():
    import salience

    with pytest.raises(StateError, match="version 1 and this salience reads version 4"):
        salience.Selector(N, epochs=2).load_state_dict({"version": 1, "population": N})
