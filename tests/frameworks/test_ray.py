"""Trials of Ray Tune and ranks of Ray Train, with real Ray on two CPUs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import salience
from salience.errors import ConfigError
from salience.feed.sharing import finding

from conftest import require

try:
    import ray
except ImportError:
    ray = None

pytestmark = [pytest.mark.skipif(ray is None and os.environ.get("CI") != "true", reason="ray is missing")]
if ray is not None:
    import ray_problem
    from ray import tune

    from salience.frameworks import ray as salience_ray


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    require(ray is not None, "ray")
    with tempfile.TemporaryDirectory(prefix="sf") as feeds, pytest.MonkeyPatch.context() as patch:
        patch.setenv("SALIENCE_FEEDS", feeds)
        patch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]))
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
        yield
        ray.shutdown()
        for name in finding.names():
            status = finding.ask(name, "stop")
            if status is not None:
                os.kill(int(status["pid"]), signal.SIGTERM)


@pytest.fixture(scope="module")
def points(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ray_problem.write_points(tmp_path_factory.mktemp("points"))


@pytest.fixture
def feed(cluster: None, points: Path) -> salience.SharedFeed:
    return salience.SharedFeed(points, name="search", decode=ray_problem.decode, cache="32MiB")


def search(tmp_path: Path, data: Any, **options: Any) -> Any:
    """A finished search over learning rates."""
    (tmp_path / "notes").mkdir(exist_ok=True)
    space = {"lr": tune.grid_search([0.5, 0.0001]), "notes": str(tmp_path / "notes"), **options.pop("space", {})}
    config = tune.RunConfig(storage_path=str(tmp_path / "results"), verbose=0, **options.pop("run", {}))
    options.setdefault("windows", 4)
    made = salience_ray.tuner(ray_problem.train, param_space=space, data=data, run_config=config, **options)
    return made.fit()


def notes(tmp_path: Path, lr: float) -> list[list[str]]:
    return [line.split() for line in (tmp_path / "notes" / f"{lr}.txt").read_text().splitlines()]


def until_no_job(name: str) -> dict[str, Any]:
    end = time.monotonic() + 30
    while (status := finding.ask(name, "status")) is not None and status["jobs"]:
        assert time.monotonic() < end
        time.sleep(0.05)
    assert status is not None
    return status


def test_trials_share_a_feed_and_the_worse_one_is_stopped_at_a_window_edge(
    feed: salience.SharedFeed, tmp_path: Path
) -> None:
    results = search(tmp_path, feed, max_concurrent_trials=1)
    by_rate = {one.config["lr"]: one for one in results}
    assert all(one.error is None for one in results)
    assert by_rate[0.5].metrics["training_iteration"] == 4
    assert by_rate[0.0001].metrics["training_iteration"] == 1
    assert by_rate[0.0001].metrics["visits"] == ray_problem.N
    assert [line[0] for line in notes(tmp_path, 0.0001)] == ["began"]
    assert [line[0] for line in notes(tmp_path, 0.5)] == ["began", "ended"]
    assert results.get_best_result().config["lr"] == 0.5
    status = until_no_job("search")
    assert status["claims"] == status["pins"] == 0
    assert status["published"] == ray_problem.N
    table = salience_ray.compared(results)
    assert table.splitlines()[1].split()[-3:] == [f"{by_rate[0.5].metrics['accuracy']:.4g}", "4", "960"]
    assert "Ledgers were not shared" in table


@pytest.mark.slow
def test_trials_of_a_search_start_from_what_a_scout_learnt_and_the_next_search_from_what_they_did(
    feed: salience.SharedFeed, tmp_path: Path
) -> None:
    ledger = salience.SharedLedger(tmp_path / "ledgers")
    space = {"select": "default"}
    first = search(tmp_path, feed, ledger=ledger, space=space, scheduler=tune.schedulers.FIFOScheduler())
    known = {one.metrics["knowledge"] for one in first}
    assert len(known) == 1
    assert known != {"nothing"}
    assert [line[5] for lr in (0.5, 0.0001) for line in notes(tmp_path, lr) if line[0] == "began"] == ["1", "0", "1"]
    assert first[0].metrics["visits"] < 4 * ray_problem.N
    jobs = sorted(path.stem for path in (tmp_path / "ledgers" / "jobs").iterdir())
    assert jobs == sorted(["scout", *(one.metrics["trial_id"] for one in first)])
    again = search(tmp_path, feed, ledger=ledger, space=space, windows=1)
    assert {one.metrics["knowledge"] for one in again}.isdisjoint(known | {"nothing"})
    assert f"same shared ledger ({known.pop()})" in salience_ray.compared(first)


@pytest.mark.slow
def test_a_report_in_the_middle_of_a_window_is_refused(feed: salience.SharedFeed, tmp_path: Path) -> None:
    results = search(tmp_path, feed, space={"mid": True, "lr": 0.5})
    assert "report() was called in the middle of a window" in str(results[0].error)
    assert "1 of 1 trials failed" in salience_ray.compared(results)
    until_no_job("search")


@pytest.mark.slow
def test_a_trial_that_dies_goes_on_from_its_checkpoint(feed: salience.SharedFeed, tmp_path: Path) -> None:
    run = {"failure_config": tune.FailureConfig(max_failures=1)}
    results = search(tmp_path, feed, space={"dies": 2, "lr": 0.5}, run=run)
    assert results[0].error is None
    began = [line[2:4] for line in notes(tmp_path, 0.5) if line[0] == "began"]
    assert began == [["0", "0"], ["2", "1"]]
    assert results[0].metrics["visits"] == 4 * ray_problem.N
    assert until_no_job("search")["claims"] == 0


@pytest.mark.slow
def test_a_restarted_collector_loses_nothing(feed: salience.SharedFeed, tmp_path: Path) -> None:
    class Kills(tune.Callback):
        def on_trial_result(self, iteration: int, trials: Any, trial: Any, result: Any, **info: Any) -> None:
            if result["training_iteration"] == 2:
                ray.kill(made.ledger.collector, no_restart=False)

    (tmp_path / "notes").mkdir()
    config = tune.RunConfig(storage_path=str(tmp_path / "results"), verbose=0, callbacks=[Kills()])
    made = salience_ray.tuner(
        ray_problem.train, param_space={"lr": 0.5, "notes": str(tmp_path / "notes")}, data=feed,
        ledger=salience.SharedLedger(tmp_path / "ledgers"), windows=4, run_config=config,
    )  # fmt: skip
    results = made.fit()
    assert results[0].error is None
    ledger = salience.ledger.load(tmp_path / "ledgers" / "jobs" / f"{results[0].metrics['trial_id']}.npz")
    assert (ledger.seen == 4).all()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*is deprecated")  # Ray's own
def test_ranks_of_a_torch_trainer_go_on_with_the_same_batches_from_rays_checkpoint(
    cluster: None, points: Path, tmp_path: Path
) -> None:
    from ray import train
    from ray.train.torch import TorchTrainer

    def run(name: str, **more: Any) -> tuple[Any, dict[tuple[int, int], list[str]]]:
        folder = tmp_path / name
        folder.mkdir()
        config = train.RunConfig(
            storage_path=str(tmp_path / "results"), name=name, failure_config=train.FailureConfig(max_failures=1)
        )
        result = TorchTrainer(
            ray_problem.train_ranks, train_loop_config={"data": str(points), "notes": str(folder), **more},
            scaling_config=train.ScalingConfig(num_workers=2), run_config=config,
        ).fit()  # fmt: skip
        files = {(epoch, rank): folder / f"{epoch}-{rank}.txt" for epoch in range(3) for rank in range(2)}
        return result, {place: file.read_text().split() for place, file in files.items()}

    _, whole = run("whole")
    result, resumed = run("resumed", dies=1)
    assert result.metrics["epoch"] == 2
    assert resumed[2, 0][0] == resumed[2, 1][0] == "1"
    assert whole[2, 0][0] == "0"
    assert {place: line[-2:] for place, line in resumed.items()} == {place: line[-2:] for place, line in whole.items()}
    for epoch in range(3):
        ids = [i for rank in range(2) for i in whole[epoch, rank][2].split(",")]
        assert len(ids) == len(set(ids)) == ray_problem.N // 2


def test_what_the_scout_gets_is_the_middle_of_every_grid() -> None:
    space = {
        "lr": tune.grid_search([1, 2, 3]),
        "net": {"depth": tune.grid_search([4, 5])},
        "p": tune.uniform(0, 1),
        "x": 7,
    }
    found = salience_ray.middle(space)
    assert {**found, "p": 0} == {"lr": 2, "net": {"depth": 5}, "p": 0, "x": 7}
    assert 0 <= found["p"] <= 1
    assert found == salience_ray.middle(space)


def test_a_ledger_that_is_neither_shared_nor_nothing_is_refused(cluster: None) -> None:
    with pytest.raises(ConfigError, match='must be "share", a SharedLedger, or None'):
        salience_ray.tuner(ray_problem.train, param_space={}, ledger="mine")


def test_without_ray_the_extra_is_named() -> None:
    code = "import sys; sys.modules['ray'] = None; import salience.frameworks.ray"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "pip install 'salience[ray]'" in found.stderr
