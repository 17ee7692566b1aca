"""The learned policy on a machine of known costs, and in a Loader: it goes where gain is, and leaves what loses."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from test_controller import KEEP, WINDOWS, Machine, actions, go
from torch.utils.data import Dataset

import salience
from salience.decide.bandit import EXPLORED_SHARE, Bandit, Belief, arms_of, trust
from salience.decide.levers import AvailableLevers, options
from salience.decide.settings import Settings
from salience.errors import ConfigError
from salience.select.steering import History

START = Settings(workers=1)
HEAVY = {"load": 0.02, "augment": 0.3}


def play(machine: Machine, controller: Bandit, reach: AvailableLevers, windows: int = WINDOWS) -> list[Settings]:
    """The settings of each window; what was kept stays as long as it is wanted, whatever else is switched."""
    used, kept = [controller.settings], (0, False)
    for window in range(1, windows):
        now = used[-1]
        warm = bool((now.cache and kept[0]) or (now.treat and kept[1]))
        kept = now.cache, now.treat
        controller.edge(window, machine.seen(window - 1, now, warm=warm), reach)
        used.append(controller.settings)
    return used


def bandit(**more) -> Bandit:
    return Bandit(START, windows=WINDOWS, batches=50 * WINDOWS, **more)


def test_two_beliefs_together_lie_between_them_and_are_surer():
    both = Belief(0.0, 1.0).with_(1.0, 0.5)
    assert 0.5 < both.mean < 1.0
    assert both.sd < 0.5


def test_it_goes_to_the_best_combination_at_once_and_stays():
    reach = AvailableLevers(cores=2, reusable=("load", "augment"), keep=KEEP)
    said, used = go(Machine(HEAVY), bandit(lossy=True), reach)
    assert used[1] != START  # behind one measured window
    assert used[-1].workers == 2
    assert used[-1].treat
    assert sum(one == START for one in used) == 1
    assert said[0].action == "try"
    assert said[0].interval[0] < said[0].predicted < said[0].interval[1]


def test_what_does_not_gain_is_left_and_the_run_ends_as_it_began():
    machine = Machine(HEAVY, useless=("workers", "treat", "select"))
    controller = bandit(lossy=True)
    said, used = go(machine, controller, AvailableLevers(cores=2, reusable=("load", "augment"), keep=KEEP))
    assert used[-1] == START
    assert "undo" in [action for action, _ in actions(said)]
    tried = [one for one in used if one != START]
    assert len(tried) <= WINDOWS // 3
    undone = [d for d in said if d.action == "undo" and d.measured is not None]
    assert undone
    assert all(d.measured == pytest.approx(1, abs=0.05) for d in undone if "select" not in d.lever)


def test_nothing_is_tried_where_nothing_can_gain():
    said, used = go(Machine({"load": 0.001}), bandit(), AvailableLevers(cores=2))
    assert {*used} == {START}
    assert not actions(said)


def test_lossy_levers_need_leave_and_are_undone_for_good_out_of_the_band():
    reach = AvailableLevers(cores=1, keep=KEEP)
    said, used = go(Machine({"load": 0.001}, compute=0.1), bandit(), reach)
    assert {*used} == {START}
    assert "changes training" in said[0].reason
    histories = [History(progress=np.linspace(0, 1, 5), metric=np.full(5, 0.9)) for _ in range(3)]
    said, used = go(Machine({"load": 0.001}, compute=0.1), bandit(histories=histories), reach, metric=0.5)
    assert any(one.select for one in used)
    assert not used[-1].select
    assert "left the baseline's band" in said[-1].reason or any("band" in d.reason for d in said)
    first = next(k for k, one in enumerate(used) if one.select)
    assert not any(one.select for one in used[first + 2 :])


def test_a_window_that_fills_a_cache_does_not_count():
    controller = bandit()
    go(Machine({"fetch": 0.1, "decode": 0.01}), controller, AvailableLevers(cores=1, cache=1 << 20), windows=4)
    [arm] = [arm for arm in controller._arms if arm.settings.cache]
    assert controller.settings == arm.settings
    assert len(arm.logs) == 1  # of the two under it, the first filled it


def test_a_cache_that_is_on_from_the_start_belongs_to_every_setting():
    start = Settings(workers=1, cache=1 << 20)
    controller = Bandit(start, windows=WINDOWS, batches=50 * WINDOWS, adopted=True)
    used = play(Machine({"fetch": 0.1, "decode": 0.06}), controller, AvailableLevers(cores=2))
    assert used[:2] == [start, start]  # the first fills it, the second is the one to compare with
    assert used[2] == used[-1] == Settings(workers=2, cache=1 << 20)
    assert len(controller._plain) == 1


def test_predictions_that_came_true_only_half_are_halved_for_other_settings():
    assert trust([]) == pytest.approx(0.8)
    assert trust([(1.386, 0.5 * 1.386)] * 5) == pytest.approx(0.5, abs=0.03)


def test_what_cannot_be_switched_is_not_tried_again():
    controller, machine, tried = bandit(), Machine({"fetch": 0.1, "decode": 0.1}), []
    for window in range(1, 8):
        controller.edge(window, machine.seen(window - 1, START), AvailableLevers(cores=2, cache=100))
        if controller.settings != START:
            tried.append(controller.settings)
            assert controller.failed(window, START, "no memory").lever != "settings"
    assert len(tried) == len({*tried}) == 3
    assert controller.settings == START
    assert len(controller._plain) == 7


def test_settings_that_are_not_expected_to_be_best_get_a_tenth_of_the_windows():
    controller = bandit(lossy=True)
    go(Machine(HEAVY, noise=0.05), controller, AvailableLevers(cores=2, reusable=("load", "augment"), keep=KEEP))
    assert controller._explored <= EXPLORED_SHARE * WINDOWS


def test_it_goes_on_from_its_state_as_if_it_had_not_stopped():
    """With levers that remember nothing: those are filled again first."""
    reach = AvailableLevers(cores=2, keep=KEEP)
    for stop in (1, 3, 7):
        whole, part, again = (bandit(lossy=True) for _ in range(3))
        _, used = go(Machine(HEAVY), whole, reach, windows=12)
        machine = Machine(HEAVY)
        _, first = go(machine, part, reach, windows=stop + 1)
        again.load_state_dict(json.loads(json.dumps(part.state_dict())))
        rest = [again.settings]
        for window in range(stop + 1, 12):
            before = [*first, *rest[1:]]
            warm = len(before) > 1 and before[-1] == before[-2]
            again.edge(window, machine.seen(window - 1, before[-1], warm=warm), reach)
            rest.append(again.settings)
        assert [*first, *rest[1:]] == used


def test_arms_are_all_combinations():
    seen = Machine({"fetch": 0.1, "decode": 0.05}).seen(0, START)
    single = options(seen.costs, START, AvailableLevers(cores=2, cache=100), 1)
    arms = arms_of(seen.costs, single, START)
    assert sorted(arm.settings.numbers for arm in arms) == [[1, 100, 0, 0], [2, 0, 0, 0], [2, 100, 0, 0]]
    assert max(arms, key=lambda arm: arm.predicted).settings == Settings(workers=2, cache=100)


@dataclass
class Slow(Dataset):
    n: int = 240

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        time.sleep(0.002)
        return torch.full((4,), float(i)), i % 2


def test_in_a_loader_it_leaves_the_batches_as_they_are(tmp_path):
    def ids(**more) -> list[list[int]]:
        loader = salience.Loader(Slow(), 8, epochs=6, num_workers=1, with_ids=True, seed=4, **more)
        seen = []
        for _ in range(6):
            for i, (x, _) in loader:
                loader.loss(x.sum(1), ids=i)
                seen.append(i.tolist())
        return seen

    assert ids(auto=True, policy="bandit", log=tmp_path / "run.jsonl") == ids()
    decisions = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    assert any(event["kind"] == "verdict" for event in decisions)


@pytest.mark.parametrize("given", ["bandits", "heuristic:file", "", "bandit:", "bandit:memory.json"])
def test_what_is_no_policy_is_said(given):
    with pytest.raises(ConfigError, match="policy is"):
        salience.Loader(Slow(8), 4, epochs=2, auto=True, policy=given)
    with pytest.raises(ConfigError, match="pass auto=True"):
        salience.Loader(Slow(8), 4, epochs=2, policy=given)
