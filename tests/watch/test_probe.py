"""Probes change nothing, and what they measure is what they say: real loaders, real processes."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import Dataset, TensorDataset

import salience
from salience.cli import main
from salience.events import MachineUse, StepCosts, read
from salience.report.profile import rendered, sparkline
from salience.run.part import Batch
from salience.run.watching import Watching
from salience.watch.probe import Enough, Session, costs_of, profiled, profiling
from salience.watch.steps import Steps
from salience.watch.usage import UsageRecord

from conftest import make_model, train


class Slow(Dataset):
    """Every sample costs `seconds` of waiting."""

    def __init__(self, seconds: float, n: int = 1600) -> None:
        self.seconds, self.n = seconds, n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        time.sleep(self.seconds)
        return torch.full((8,), float(i % 7)), i % 4


@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_with_probes_is_the_run_without(problem: TensorDataset, workers: int):
    def go(session: Session | None):
        seen: list[list[int]] = []

        def run() -> torch.nn.Module:
            loader = salience.Loader(problem, 8, epochs=4, select="default", with_ids=True, num_workers=workers)
            model = make_model()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for _ in range(4):
                for ids, (x, y) in loader:
                    seen.append(ids.tolist())
                    logits = model(x)
                    loss = loader.loss(F.cross_entropy(logits, y, reduction="none"), logits, y)
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
            return model

        if session is None:
            return run(), seen
        with profiling(session):
            return run(), seen

    session = Session(stop=False, times=3)
    (plain, batches), (probed, probed_batches) = go(None), go(session)
    assert session.found[0][0].done == 3 - (len(batches) < 250)  # every 64 steps
    assert batches == probed_batches
    for a, b in zip(plain.parameters(), probed.parameters(), strict=True):
        assert torch.equal(a, b)


def test_the_loader_alone_and_the_loop_alone_are_what_they_cost():
    with profiling(Session(times=2)) as session, pytest.raises(Enough):
        loader = salience.Loader(Slow(0.0005), 8, num_workers=1)
        for _ in range(10):
            for x, _ in loader:
                time.sleep(0.01)
                loader.loss(x.mean(1))
    found = session.measured()
    assert found is not None
    costs, _ = found
    assert costs.input > 0.8 * 8 * 0.0005  # never faster than what it waits for
    assert costs.compute > 0.8 * 0.01
    assert min(session.found[0][0].inputs) < costs.compute  # of two probes one may meet a busy machine
    assert costs.work["load"] > 0.8 * 8 * 0.0005
    assert costs.forward > 0.8 * 0.01  # the loop sleeps before loss()


def test_loaders_outside_a_profile_have_no_probe(problem):
    loader = salience.Loader(problem, 10)
    train(loader, lambda losses, logits, y: loader.loss(losses), epochs=1)
    assert loader.probe is None
    assert loader.steps.count == 30
    assert all(step.wait >= 0 and step.busy > 0 for step in list(loader.steps.steps)[:-1])


def test_time_between_windows_belongs_to_no_step():
    steps = Steps()
    steps.ask()
    steps.got()
    steps.pause()
    time.sleep(0.05)
    steps.ask()
    steps.got()
    assert steps.steps[0].busy == 0
    assert steps.steps[1].wait < 0.05


class LongLook(UsageRecord):
    """A machine that takes long to look at."""

    def note(self, *, now: bool = False) -> bool:
        time.sleep(0.05)
        return True


def test_a_look_at_the_machine_belongs_to_no_step():
    watching = Watching()
    watching.usage, steps = LongLook(), watching.steps
    steps.ask()
    steps.got()
    watching.take_back(Batch(0, 0, np.arange(3)))
    steps.got()
    assert steps.steps[0].busy < 0.05
    assert steps.steps[1].wait < 0.05


def test_copying_is_a_part_of_its_own_where_the_loop_says_so():
    steps = Steps()
    for copies in (True, False):
        steps.ask()
        steps.got()
        if copies:
            time.sleep(0.01)
            steps.copied()
        steps.on_loss(torch.ones(1))
    steps.ask()
    told, silent = steps.steps
    assert told.copy >= 0.01
    assert told.forward < told.copy
    assert silent.copy == 0
    assert steps.spent().copy == told.copy
    costs = StepCosts(step=0.02, wait=0, input=0.001, compute=0.02, work={}, copy=0.005, forward=0.01, backward=0.005)
    assert "copy" in rendered(profiled(costs, cores=2, losses=True))


def test_waiting_for_gradients_is_a_part_of_its_own_and_steps_of_a_trial_are_left_out():
    steps = Steps()
    for trying in [True] * 6 + [False] * 6:
        steps.ask()
        steps.got()
        steps.on_loss(torch.ones(1))
        time.sleep(0.003)
        steps.synced(0.05 if trying else 0.002, trying=trying)
    steps.ask()
    assert [step.trying for step in steps.steps] == [True] * 6 + [False] * 6
    assert all(step.sync <= step.backward for step in steps.steps)
    found = costs_of(list(steps.steps), [], 0)
    assert found is not None
    assert (found.steps, found.sync) == (6, pytest.approx(0.002))
    assert found.forward + found.backward + found.sync == pytest.approx(found.compute)
    said = rendered(profiled(found, cores=2, losses=True))
    assert "gradient sync" in said
    assert "Without gradient sync a step would take" in said


SCRIPT = """
    import sys, time, torch, salience

    class Data(torch.utils.data.Dataset):
        def __len__(self): return 4000
        def __getitem__(self, i):
            time.sleep(float(sys.argv[1]))
            return torch.ones(4), 0

    loader = salience.Loader(Data(), batch_size=4)
    for epoch in range(50):
        for x, y in loader:
            time.sleep(float(sys.argv[2]))
            {loss}
    print("came to its end")
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(SCRIPT.format(loss="loader.loss(x.mean(1))")))
    return path


@pytest.mark.parametrize(("load", "loop", "not_bound_by"), [("0.003", "0.0", "compute"), ("0.0", "0.03", "input")])
def test_profile_names_what_holds_a_script_back(script, load, loop, not_bound_by, tmp_path):
    """On a machine that does other things too a loop of sleeps may wait a little: the verdict is then "mixed"."""
    options = ["--probes", "1", "--json", "p.json", "--", load, loop]
    command = [sys.executable, "-m", "salience", "profile", str(script), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "came to its end" not in done.stdout
    found = json.loads((tmp_path / "p.json").read_text())
    assert done.stdout.startswith(found["text"])
    assert found["bound"] != not_bound_by
    assert (found["costs"]["input"] > found["costs"]["compute"]) == (not_bound_by == "compute")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("print('no salience')", "made no salience.Loader"),
        ("import salience\nfor _ in salience.Loader([1, 2, 3], 1): pass", "too few"),
    ],
)
def test_a_script_that_cannot_be_profiled_is_told_why(tmp_path, capsys, text, said):
    (tmp_path / "short.py").write_text(text)
    assert main(["profile", str(tmp_path / "short.py")]) == 2
    assert said in capsys.readouterr().err


def test_wrong_arguments_of_profile(capsys):
    assert main(["profile"]) == 2
    assert main(["profile", "nowhere.py"]) == 2
    assert "no script" in capsys.readouterr().err


def test_a_gpu_that_is_hardly_busy_does_not_hold_the_loop_back():
    costs = StepCosts(step=0.01, wait=0.0001, input=0.001, compute=0.0099, work={"load": 0.001}, workers=2, steps=50)
    for busy, said in ((0.2, True), (0.9, False)):
        usage = [MachineUse(seconds=float(k), cpu=0.1, memory=0.1, disk=0, network=0, gpu=(busy,)) for k in range(6)]
        made = profiled(costs, cores=2, losses=True, usage=usage)
        assert made.bound == "compute"
        assert any("busy only 20% of the time" in note for note in made.notes) == said


def test_a_profile_goes_into_an_event_log_and_from_there_into_a_report(script, tmp_path, capsys):
    log = tmp_path / "log" / "run.jsonl"
    assert main(["profile", str(script), "--probes", "1", "--log", str(log), "--", "0.002", "0.0"]) == 0
    first = capsys.readouterr().out.splitlines()[0]
    event = [event for event in read(log) if event["kind"] == "verdict"][-1]
    assert event["text"] == first
    assert event["costs"]["step"] > 0
    assert event["levers"]
    if importlib.util.find_spec("psutil") is not None:
        assert event["usage"]
        assert all(0 <= one["memory"] <= 1 for one in event["usage"])
    assert main(["report", str(log), "-o", str(tmp_path / "report.html")]) == 0
    page = (tmp_path / "report.html").read_text()
    assert "Where the time went" in page
    assert "stays exactly the same" in page


def test_sparklines_are_as_high_as_their_values_and_never_long():
    assert sparkline([0.0, 0.5, 1.0]) == " ▄█"
    assert len(sparkline([0.5] * 1000)) <= 40
