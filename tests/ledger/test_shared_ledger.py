"""Jobs that share what they learn: a comparison starts from one snapshot, and nothing that one job does stops another."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.utils.data import TensorDataset

import salience
from salience.errors import ConfigError, StateError

from conftest import make_model, train


def run(problem: TensorDataset, ledger: Any, *, epochs: int = 4, seed: int = 0, **options: Any) -> salience.Loader:
    loader = salience.Loader(
        problem, 20, epochs=epochs, seed=seed, **{"select": "default", "ledger": ledger, **options}
    )
    train(loader, loader.loss, epochs=epochs)
    return loader


def visited(loader: salience.Loader) -> list[int]:
    return [event["picked"] for event in loader.events.recent if event["kind"] == "plan"]


def test_a_job_starts_from_what_others_have_learnt_and_does_not_warm_up(problem: TensorDataset, tmp_path: Path) -> None:
    first = run(problem, salience.SharedLedger(tmp_path, job="first"))
    second = salience.Loader(problem, 20, epochs=4, select="default", ledger=salience.SharedLedger(tmp_path))
    np.testing.assert_array_equal(second.ledger.seen, first.ledger.seen)
    np.testing.assert_array_equal(second.ledger.mean_loss, first.ledger.mean_loss)
    train(second, second.loss, epochs=4)
    assert visited(first)[0] == len(problem)
    assert visited(second)[0] < len(problem)
    assert visited(second)[-1] == len(problem)  # the end of the curve is as it was
    assert second.visits < first.visits


def test_every_window_is_there_for_jobs_that_start_while_this_one_runs(problem: TensorDataset, tmp_path: Path) -> None:
    seen = []
    loader = salience.Loader(problem, 20, epochs=3, ledger=salience.SharedLedger(tmp_path))
    for _ in range(3):
        train(loader, loader.loss, epochs=1)
        known = salience.SharedLedger(tmp_path).begin().ledger
        assert known is not None
        seen.append(int(known.seen.max()))
    assert seen == [1, 2, 3]


def test_what_several_jobs_have_seen_adds_up_also_if_they_learnt_from_each_other(
    problem: TensorDataset, tmp_path: Path
) -> None:
    jobs = [run(problem, salience.SharedLedger(tmp_path, job=job), seed=seed) for seed, job in enumerate("abc")]
    known = salience.SharedLedger(tmp_path).begin()
    assert known.jobs == 3
    assert known.ledger is not None
    assert int(known.ledger.seen.sum()) == sum(job.visits for job in jobs)
    own = salience.ledger.load(tmp_path / "jobs" / "c.npz")
    assert int(own.seen.sum()) == jobs[2].visits
    assert np.isnan(own.mean_loss).sum() == (own.seen == 0).sum()
    aum, margin = known.ledger.margin_sum / known.ledger.seen, [job.ledger.margin for job in jobs]
    assert np.corrcoef(aum, np.mean(margin, axis=0))[0, 1] > 0.8


def test_jobs_of_a_comparison_start_from_the_same_whoever_has_finished_meanwhile(
    problem: TensorDataset, tmp_path: Path
) -> None:
    run(problem, salience.SharedLedger(tmp_path, job="before"))
    known = []
    for seed in range(3):
        shared = salience.SharedLedger(tmp_path, comparison="rates", job=f"rate-{seed}")
        known.append(run(problem, shared, seed=seed)._run.sharing.known.digest)
    assert len(set(known)) == 1
    later = salience.SharedLedger(tmp_path, comparison="widths").begin()
    assert later.jobs == 4
    assert later.digest != known[0]


def test_a_comparison_that_began_with_nothing_stays_there(problem: TensorDataset, tmp_path: Path) -> None:
    first = run(problem, salience.SharedLedger(tmp_path, comparison="all"))
    second = run(problem, salience.SharedLedger(tmp_path, comparison="all"))
    assert visited(first) == visited(second)
    assert "started from nothing, as did every job of the comparison 'all'" in second.report()


def _ask(folder: Path, barrier: Any, found: Any) -> None:
    barrier.wait()
    found.put(salience.SharedLedger(folder, comparison="race").begin().digest)


def test_of_jobs_that_begin_at_once_all_get_the_same_snapshot(problem: TensorDataset, tmp_path: Path) -> None:
    run(problem, salience.SharedLedger(tmp_path))
    context = multiprocessing.get_context("fork")
    barrier, found = context.Barrier(4), context.Queue()
    jobs = [context.Process(target=_ask, args=(tmp_path, barrier, found)) for _ in range(4)]
    for job in jobs:
        job.start()
    digests = {found.get(timeout=30) for _ in jobs}
    for job in jobs:
        job.join()
    assert len(digests) == 1
    assert digests != {"nothing"}


def test_a_resumed_job_keeps_its_plans_whatever_others_know_by_then(problem: TensorDataset, tmp_path: Path) -> None:
    whole = run(problem, salience.SharedLedger(tmp_path / "a"))
    half = salience.Loader(problem, 20, epochs=4, select="default", ledger=salience.SharedLedger(tmp_path / "b"))
    model = make_model()
    train(half, half.loss, epochs=2, model=model)
    state = half.state_dict()
    run(problem, salience.SharedLedger(tmp_path / "b", job="other"))
    again = salience.Loader(problem, 20, epochs=4, select="default", ledger=salience.SharedLedger(tmp_path / "b"))
    again.load_state_dict(state)
    train(again, again.loss, epochs=2, model=model)
    assert visited(half) + visited(again) == visited(whole)
    np.testing.assert_array_equal(again.ledger.mean_loss, whole.ledger.mean_loss)
    jobs = sorted((tmp_path / "b" / "jobs").iterdir())
    assert len(jobs) == 2  # under the same name as before
    given = {path.stem: int(salience.ledger.load(path).seen.sum()) for path in jobs}
    del given["other"]
    assert [*given.values()] == [whole.visits]


def test_observing_shares_and_changes_nothing(problem: TensorDataset, tmp_path: Path) -> None:
    plain = [ids.tolist() for ids, _ in salience.Loader(problem, 20, with_ids=True)]
    run(problem, salience.SharedLedger(tmp_path), select=None)
    shared = salience.Loader(problem, 20, with_ids=True, ledger=salience.SharedLedger(tmp_path))
    assert [ids.tolist() for ids, _ in shared] == plain


def test_runs_with_different_knowledge_are_told_apart_when_compared(problem: TensorDataset, tmp_path: Path) -> None:
    from salience.report.compared import compare
    from salience.report.reader import read_log, story_of

    stories = []
    for name in ("early", "late"):
        log = tmp_path / f"{name}.jsonl"
        run(problem, salience.SharedLedger(tmp_path / "shared"), log=log)
        stories.append(story_of(read_log(log), name=name))
    compared = compare(stories)
    assert len(compared.arms) == 2
    assert any("did not start from the same shared ledger (early from nothing" in note for note in compared.notes)


def test_a_folder_that_cannot_be_written_to_is_said_once_and_the_job_goes_on(
    problem: TensorDataset, tmp_path: Path
) -> None:
    shared = salience.SharedLedger(tmp_path)
    (tmp_path / "jobs").write_text("in the way")
    loader = salience.Loader(problem, 20, epochs=3, ledger=shared)
    train(loader, loader.loss, epochs=3)
    warnings = [event["text"] for event in loader.events.recent if event["kind"] == "warning"]
    assert len(warnings) == 1
    assert "cannot be given to others" in warnings[0]
    assert (loader.ledger.seen == 3).all()


def test_a_job_over_other_data_is_refused(problem: TensorDataset, tmp_path: Path) -> None:
    run(problem, salience.SharedLedger(tmp_path), epochs=2)
    with pytest.raises(StateError, match="has 300 samples, the data set 10"):
        salience.Loader(range(10), 5, ledger=salience.SharedLedger(tmp_path))
    salience.ledger.save(salience.Ledger(10), tmp_path / "jobs" / "other.npz")
    with pytest.raises(StateError, match="do not train on the same data"):
        salience.SharedLedger(tmp_path).begin()


@pytest.mark.parametrize("name", ["../x", "a b", "x" * 200])
def test_a_name_that_is_no_file_name_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="becomes the name of a file"):
        salience.SharedLedger(tmp_path, comparison=name)


def test_share_needs_a_feed(problem: TensorDataset) -> None:
    with pytest.raises(ConfigError, match="needs a SharedFeed"):
        salience.Loader(problem, 20, ledger="share")
