"""Stages in the Loader: same tensors whatever the workers, resumed or not; reuse as planned; bad input in one sentence."""

from __future__ import annotations

import random
import time

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset

import salience
from salience import Stage, Treat
from salience.plan import REUSED

N = 60


class Rows(Dataset):
    """Sample i is (a row of i, i)."""

    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        return torch.full((4,), float(i)), i


def widen(x: Tensor) -> Tensor:
    return torch.cat((x, x))


def jitter(x: Tensor) -> Tensor:
    """Draws from all three generators."""
    return x + torch.rand(1) + np.random.rand() * 10 + random.random() * 100  # noqa: NPY002


def shuffle(x: Tensor) -> Tensor:
    return x[torch.randperm(len(x))] + torch.rand(1)


PLAIN = [Stage(widen, random=False), jitter]
FROZEN = [Stage(widen, random=False), Stage(jitter, random=True, freeze=True), shuffle]
REUSE = Treat("reuse", split=1)  # by hand: these stages cost less than keeping what they give
REUSE_FROZEN = Treat("reuse", split=2)


def loader_of(augment=PLAIN, treat=REUSE, data=None, **more):
    return salience.Loader(Rows() if data is None else data, 10, epochs=8, augment=augment, treat=treat, seed=5, **more)


def run(loader, windows=4, losses=None):
    """Window -> sample -> tensor (a list where it has several views)."""
    out = []
    for _ in range(windows):
        seen = {}
        for x, y in loader:
            loader.loss(torch.ones(len(y)) if losses is None else losses[y])
            for row, i in zip(x, y.tolist(), strict=True):
                seen.setdefault(i, []).append(row)
        out.append({i: torch.stack(rows) for i, rows in seen.items()})
    return out


def assert_same(a, b):
    assert len(a) == len(b)
    for one, two in zip(a, b, strict=True):
        assert one.keys() == two.keys()
        for i in one:
            assert torch.equal(one[i], two[i]), f"sample {i}"


@pytest.mark.parametrize(
    ("augment", "treat"), [(PLAIN, None), (PLAIN, REUSE), (FROZEN, None), (FROZEN, REUSE_FROZEN)],
    ids=["fresh", "reuse", "frozen fresh", "frozen reuse"],
)  # fmt: skip
def test_the_number_of_workers_does_not_change_a_tensor(augment, treat):
    assert_same(run(loader_of(augment, treat)), run(loader_of(augment, treat, num_workers=2)))


def test_reuse_of_deterministic_stages_changes_no_tensor():
    assert_same(run(loader_of(treat=None)), run(loader_of()))


def test_frozen_draws_are_kept_and_the_rest_is_fresh():
    loader = loader_of(FROZEN, REUSE_FROZEN)
    windows, levels = [], []
    for _ in range(6):
        windows += run(loader, 1)
        levels.append(dict(zip(loader.plan.ids.tolist(), loader.plan.level.tolist(), strict=True)))
    reused = 0
    for w in range(1, 6):
        for i in range(N):
            now, before = windows[w][i], windows[w - 1][i]
            assert not torch.equal(now, before), "two windows show the identical tensor"
            if levels[w][i] == REUSED:
                reused += 1
                assert (now - before).abs().max() < 1.01, "the frozen draws changed"
    assert reused > N


def test_a_run_that_was_resumed_gives_the_same_tensors_without_the_memory():
    whole = run(loader_of(FROZEN, REUSE_FROZEN), 5)
    first = loader_of(FROZEN, REUSE_FROZEN)
    head = run(first, 2)
    stopped = {}
    for k, (x, y) in enumerate(first):
        first.loss(torch.ones(len(y)))
        stopped.update({i: row[None] for row, i in zip(x, y.tolist(), strict=True)})
        if k == 2:
            state = first.state_dict()
            break
    second = loader_of(FROZEN, REUSE_FROZEN, num_workers=1)
    second.load_state_dict(state)
    tail = run(second, 3)
    assert_same(whole, [*head, {**stopped, **tail[0]}, *tail[1:]])
    assert second._run.staging.treating.counts["missed"] > 0


def test_a_state_of_other_stages_is_refused():
    loader = loader_of()
    run(loader, 1)
    with pytest.raises(salience.StateError, match="saved with the stages widen, jitter"):
        loader_of(FROZEN).load_state_dict(loader.state_dict())
    with pytest.raises(salience.StateError, match="same augment="):
        salience.Loader(Rows(), 10, epochs=8, seed=5).load_state_dict(loader.state_dict())


@pytest.mark.slow
def test_spawned_workers_give_the_same_tensors():
    assert_same(run(loader_of(), 2), run(loader_of(num_workers=1, multiprocessing_context="spawn"), 2))


def test_intermediates_survive_workers_that_end_with_each_window():
    loader = loader_of(num_workers=2)
    run(loader, 5)
    counts = loader._run.staging.treating.counts
    assert counts["reused"] > N
    assert counts["missed"] == counts["unfit"] == 0
    assert counts["visits"] == 5 * N == counts["fresh"] + counts["stored"] + counts["reused"]


def test_reuse_does_not_follow_the_losses():
    levels = np.zeros((2, 8, N), dtype=np.uint8)
    for found, losses in zip(levels, (torch.ones(N), torch.arange(N).float()), strict=True):
        loader = loader_of()
        for window in range(8):
            run(loader, 1, losses)
            found[window, loader.plan.ids] = loader.plan.level
    assert (levels[0] == levels[1]).all()
    assert 0.5 < (levels[0, 2:] == REUSED).mean() < 0.75
    assert ((levels[0] == REUSED).any(axis=0)).all(), "every sample has its turn"


def test_reuse_with_selection_on():
    loader = salience.Loader(Rows(), 10, epochs=8, augment=PLAIN, treat=REUSE, select="infobatch", seed=5)
    run(loader, 6, torch.arange(N).float())
    assert loader._run.staging.treating.counts["reused"] > 0
    assert loader._run.staging.treating.counts["missed"] == 0


def test_a_recorded_trace_is_replayed_with_its_levels(tmp_path):
    first = loader_of(FROZEN, REUSE_FROZEN, trace=tmp_path)
    a = run(first, 8)
    again = salience.Loader(
        Rows(), 10, epochs=8, augment=FROZEN, treat=REUSE_FROZEN, seed=5, select=salience.Trace(tmp_path)
    )
    assert_same(a, run(again, 8))


def test_the_users_generators_are_left_alone():
    def states():
        return torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()  # noqa: NPY002

    before = states()
    run(loader_of(), 2)
    assert states() == before


def test_costs_are_in_the_ledger_and_in_the_report(tmp_path):
    loader = loader_of(log=tmp_path / "events.jsonl")
    run(loader, 5)
    assert (loader.ledger.cost_us > 0).all()
    text = loader.report()
    assert "widen" in text
    assert "jitter" in text
    assert f"Of {5 * N} visits" in text
    assert "A sample was fresh at" in text
    told = [e for e in salience.events.read(tmp_path / "events.jsonl") if e["kind"] == "treat"]
    assert [e["window"] for e in told] == list(range(5))
    assert told[-1]["reused"] > 0


def test_the_report_names_frozen_stages():
    loader = loader_of(FROZEN, REUSE_FROZEN)
    run(loader, 2)
    assert "visits at most: jitter." in loader.report()


def test_strength_is_the_importance_of_the_sample():
    def brighten(x: Tensor, strength: float) -> Tensor:
        return torch.full((1,), strength)

    loader = loader_of([brighten], Treat(strength=True))
    losses = torch.arange(N).float()
    first, second = run(loader, 2, losses)
    assert all((first[i] == 1).all() for i in range(N)), "at first nothing is known"
    strengths = torch.stack([second[i].flatten()[0] for i in range(N)])
    assert (strengths.diff() > 0).all()
    assert 0 <= strengths.min() < 0.05 < 0.95 < strengths.max() <= 1


def fails_on_seven(x: Tensor) -> Tensor:
    if x[0] == 7:
        raise ValueError("seven")
    return x


@pytest.mark.parametrize("workers", [0, 1])
def test_a_sample_on_which_a_stage_fails_is_stood_in_for_and_named(workers):
    loader = loader_of([fails_on_seven, jitter], None, max_broken=0.1, num_workers=workers)
    for _, y in loader:
        losses = torch.ones(len(y), requires_grad=True)
        loader.loss(losses).backward()
        weight = dict(zip(y.tolist(), losses.grad.tolist(), strict=True))
        for i, w in weight.items():
            assert w == pytest.approx(0.0 if i == 7 else 0.1)
    report = loader.report()
    assert "sample        7" in report
    assert "stage 'fails_on_seven' failed on it (ValueError: seven)" in report


def test_more_broken_samples_than_allowed_stop_the_run():
    loader = loader_of([fails_on_seven, jitter], None, max_broken=0.0)
    with pytest.raises(salience.DataError, match="max_broken"):
        run(loader, 1)


def noise(x: Tensor) -> Tensor:
    return x + torch.rand(1)


class Own:
    """Random by a generator of its own, which leaves the global ones alone."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)

    def __call__(self, x: Tensor) -> Tensor:
        return x + self.rng.random()


def turn(x: Tensor) -> Tensor:
    """Random, and nobody can see it: every row is constant."""
    return x.flip(0) if torch.rand(()) < 0.5 else x


@pytest.mark.parametrize("secret", [noise, turn, Own()], ids=["global", "unseen", "own"])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_stage_that_is_secretly_random_is_found_out(secret, workers, caplog):
    loader = loader_of(
        [Stage(widen, random=False), Stage(secret, random=False, name="secret"), jitter], num_workers=workers
    )
    run(loader, 1)
    assert "Stage 'secret' is declared random=False and is not" in caplog.text
    with pytest.raises(salience.ConfigError, match="what stage 'secret' gives may not be kept"):
        run(loader_of([Stage(secret, random=False, name="secret"), jitter]), 1)
    with pytest.raises(salience.ConfigError, match="is declared random=False and is not"):
        run(loader_of([Stage(secret, random=False, name="secret"), jitter], "reuse", strict=True), 1)


class Drawing(Rows):
    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        return torch.rand(4), i


def test_a_data_set_that_draws_itself_is_not_kept_but_is_reproducible(caplog):
    a = run(loader_of(data=Drawing(), treat="reuse"), 3)
    assert "the data set itself draws random numbers" in caplog.text
    assert_same(a, run(loader_of(data=Drawing(), treat="reuse", num_workers=2), 3))
    assert not torch.equal(a[0][0], a[1][0])


def test_stages_not_declared_are_never_kept_and_that_is_said(caplog):
    loader = loader_of([widen, jitter], "reuse")
    run(loader, 2)
    assert "treat='reuse' does nothing" in caplog.text
    assert "what stage 'widen' gives may not be kept" in caplog.text
    with pytest.raises(salience.ConfigError, match="what stage 'widen' gives may not be kept"):
        run(loader_of([widen, jitter]), 1)


def slow(x: Tensor) -> Tensor:
    end = time.perf_counter() + 3e-3
    while time.perf_counter() < end:
        pass
    return x


def test_what_costs_most_is_kept_where_nothing_else_is_said():
    loader = loader_of([Stage(slow, random=False), jitter], "reuse")
    run(loader, 2)
    assert loader._run.staging.treating.split.stages == 1
    assert loader._run.staging.treating.saved > 0


def ragged(x: Tensor) -> Tensor:
    return x[: 2 + int(x[0]) % 2]


def test_different_shapes_are_one_clear_sentence():
    with pytest.raises(
        salience.DataError, match=r"Stages gave shape \(\d,\) at position 0 .* 'ragged', must give one shape"
    ):
        run(loader_of([ragged], None), 1)


def test_a_stage_that_cannot_be_sent_to_spawned_workers_is_named():
    with pytest.raises(
        salience.ConfigError, match=r"Stage '<lambda>' cannot be sent to workers that are started by spawn"
    ):
        loader_of([lambda x: x], None, num_workers=1, multiprocessing_context="spawn")


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"treat": "reusing", "augment": PLAIN}, "Did you mean 'reuse'"),
        ({"treat": "reuse"}, "augment= is empty"),
        ({"augment": widen}, "pass a list of stages"),
        ({"augment": [3]}, "cannot be called"),
        ({"augment": [widen, widen]}, "Several stages are called 'widen'"),
    ],
)
def test_wrong_arguments_are_one_clear_sentence(more, words):
    with pytest.raises(salience.ConfigError, match=words):
        salience.Loader(Rows(), 10, **more)


def test_options_out_of_range_are_said():
    for options in ({"r_max": 0}, {"views": 0}, {"distance": 0}, {"memory": "2 apples"}):
        with pytest.raises(salience.ConfigError):
            Treat("reuse", **options)
    with pytest.raises(salience.ConfigError, match="from 0 to 1"):
        run(loader_of(treat=Treat("reuse", split=2)), 1)


def test_little_memory_keeps_few_and_none_keeps_nothing(caplog):
    loader = loader_of(treat=Treat("reuse", memory=4096, split=1))
    run(loader, 4)
    slots = loader._run.staging.treating.split.slots
    assert 1 <= slots < N
    assert 0 < loader._run.staging.treating.counts["reused"] <= 3 * slots
    run(loader_of(treat=Treat("reuse", memory=10)), 1)
    assert "no intermediate fits" in caplog.text
