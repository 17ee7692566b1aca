"""Static selection: one subset, chosen once; the same after a resume, and by the mean over several ledgers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import salience
from salience import ledger as ledgers
from salience.errors import ConfigError
from salience.ledger import Ledger
from salience.select.ranks import rank_normalise
from salience.testing import sample_ledger

N = 100
STATIC = {
    "preset": "uniform", "scores": ["loss"], "sampler": {"name": "ratio", "explore": 0.0},
    "keep": {"name": "all_less_all", "share": 0.4}, "mode": "static", "after": 2,
}  # fmt: skip


def run(
    selector: salience.Selector, until: int = 8, state_at: int | None = None
) -> tuple[list[list[int]], dict | None]:
    """Ids of every window; losses equal ids, so that the hardest are known. The state in the middle of a window, if asked."""
    windows, state = [], None
    for window in range(selector.epoch, until):
        windows.append([])
        for step, (ids, _) in enumerate(selector):
            selector.loss(ids.float() if window < 5 else -ids.float())  # what is hard changes, and must not matter
            windows[-1] += ids.tolist()
            if window == state_at and step == 1:
                return windows, selector.state_dict()
    return windows, state


def made(**more) -> salience.Selector:
    return salience.Selector(N, batch_size=10, epochs=8, select={**STATIC, **more})


def test_everything_is_scored_and_then_one_subset_is_visited_in_new_orders():
    selector = made()
    windows, _ = run(selector)
    assert [len(ids) for ids in windows] == [N, N] + [40] * 6
    assert all(sorted(ids) == list(range(60, 100)) for ids in windows[2:])
    assert len({tuple(ids) for ids in windows[2:]}) == 6
    assert selector.visits_expected == 2 * N + 6 * 40
    assert selector.total_steps == 2 * 10 + 6 * 4
    assert (
        "Selection is static: one fixed subset of 40 of 100 samples, chosen after 2 epochs of everything"
        in selector.report()
    )
    assert "Selection is dynamic" in salience.Selector(N, epochs=8, select="uniform").report()


@pytest.mark.parametrize("at", [2, 5])
def test_a_resumed_run_goes_on_with_the_same_subset(at):
    whole, _ = run(made())
    first, state = run(made(), state_at=at)
    resumed = made()
    resumed.load_state_dict(state)
    second, _ = run(resumed)
    assert [*first[:-1], first[-1] + second[0], *second[1:]] == whole


def test_the_mean_score_over_several_ledgers_chooses_before_the_first_epoch(tmp_path):
    files, losses = [], np.random.default_rng(0).random((3, N)).astype(np.float32)
    for k in range(3):
        ledger = Ledger(N)
        ledger.record(np.arange(N), {"loss": losses[k]}, window=0)
        files.append(str(tmp_path / f"{k}.npz"))
        ledgers.save(ledger, files[-1])
    select = {name: value for name, value in STATIC.items() if name != "after"}
    selector = salience.Selector(N, batch_size=10, epochs=8, select={**select, "ledgers": files})
    windows, _ = run(selector)
    hardest = np.argsort(losses.mean(axis=0))[-40:]
    assert all(sorted(ids) == sorted(hardest.tolist()) for ids in windows)
    assert "the mean score over 3 ledgers" in selector.report()


def test_weights_of_an_unbiased_draw_stay_with_their_samples():
    selector = made(sampler="probability")
    seen: list[dict[int, float]] = []
    for _ in range(8):
        seen.append({})
        for ids, weights in selector:
            selector.loss(ids.float())
            seen[-1] |= dict(zip(ids.tolist(), weights.tolist(), strict=True))
    assert len(set(seen[2].values())) > 5
    assert all(window == seen[2] for window in seen[2:])


def test_what_cannot_go_with_a_fixed_subset_is_refused():
    with pytest.raises(ConfigError, match="after is 8 and the run has 8 epochs"):
        made(after=8)
    with pytest.raises(ConfigError, match="scores that know nothing"):
        next(iter(made(after=0)))
    with pytest.raises(ConfigError, match="for mode = 'static'"):
        made(mode="dynamic")
    with pytest.raises(ConfigError, match=r"select\.mode is 'fixed'"):
        made(mode="fixed")
    with pytest.raises(ConfigError, match="fixes them; leave one out"):
        made(fetch={})


def test_a_ledger_to_start_from_is_enough():
    known = sample_ledger()
    selector = salience.Selector(
        known.n, batch_size=10, epochs=8, select={**STATIC, "scores": ["ema_loss"], "after": 0}, ledger=known
    )
    best = rank_normalise(known.mean_loss) >= 1 - 100 / known.n
    windows = [torch.cat([ids for ids, _ in selector]).tolist()]
    assert set(windows[0]) == set(np.flatnonzero(best).tolist())
    assert len(windows[0]) == 100
