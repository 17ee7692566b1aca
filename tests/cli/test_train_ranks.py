"""`salience train` on several ranks under torchrun: what is divided, how gradients travel, and what a kill leaves."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from folders import photos

from salience import ledger as ledgers
from salience.app import checkpoint
from salience.app.parallel import check, useless
from salience.cli import main
from salience.config import TrainConfig
from salience.errors import ConfigError

FACTORY = '''
"""A model that ends the process of one rank by a signal at a given training step."""
import os, signal
from torch import nn

class Model(nn.Module):
    steps = 0

    def __init__(self, classes, size):
        super().__init__()
        self.conv = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(4 * size * size, 16), nn.Dropout(0.2), nn.Linear(16, classes))

    def forward(self, x):
        name, _, step = os.environ.get("END_BY", "").partition(":")
        self.steps += self.training
        if name and self.steps == int(step) and os.environ.get("RANK", "0") == os.environ.get("END_RANK", "1"):
            os.kill(os.getpid(), signal.Signals[name])
        return self.body(self.conv(x))
'''


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with images, a model of its own, and an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "finishing.py").write_text(FACTORY)
    photos(tmp_path / "data")
    return tmp_path


def options(**changes: Any) -> list[str]:
    given = {
        "data": "data",
        "model": "finishing:Model",
        "epochs": 2,
        "batch_size": 8,
        "workers": 0,
        "out": "out",
        **changes,
    }
    return ["train", *(f"--{name.replace('_', '-')}={value}" for name, value in given.items())]


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path), **more}


def two_ranks(*args: str, **more: str) -> subprocess.CompletedProcess[str]:
    """The command on two ranks of this machine, with what torchrun would tell them; returns rank 0's end."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    where = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "salience", *args], env=environment(RANK=str(rank), LOCAL_RANK=str(rank), **where, **more),
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in (0, 1)
    ]  # fmt: skip
    said = [process.communicate(timeout=200) for process in ranks]
    return subprocess.CompletedProcess(args, ranks[0].returncode, *said[0])


def parameters(out: str) -> dict[str, torch.Tensor]:
    return checkpoint.read(Path(out) / checkpoint.LAST)["model"]


def seen(out: str) -> set[int]:
    """How often images were trained on."""
    return set(ledgers.load(Path(out) / checkpoint.LEDGER).seen.tolist())


def test_two_ranks_train_what_one_process_trains_and_rank_0_alone_writes():
    done = two_ranks(*options(out="two"), "--balance")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("epoch   1/2") == 1
    assert seen("two") == {2}
    assert not Path("two/lock").exists()


def test_a_killed_run_of_two_ranks_goes_on_with_one_in_mid_epoch():
    given = options(checkpoint_every=1)
    killed = two_ranks(*given, END_BY="SIGKILL:4")
    assert killed.returncode != 0
    state = checkpoint.newest(Path("out"), print)["loader"]
    assert (state["world"], len(state["course"]["delivered"])) == (2, 3)
    assert main([*given, "--resume"]) == 0
    assert seen("out") == {2}, "every image once in each epoch"


def test_what_is_divided_may_change_at_every_resume_and_the_model_stays_that_of_one_run():
    given = options(select="default", checkpoint_every=1)
    assert two_ranks(*given, "--out=whole").returncode == 0
    assert two_ranks(*given, "--zero=3", END_BY="SIGKILL:4").returncode != 0
    assert two_ranks(*given, "--zero=1", "--resume", END_BY="SIGKILL:4").returncode != 0
    done = two_ranks(*given, "--zero=2", "--resume")
    assert done.returncode == 0, done.stderr
    assert "Going on at epoch 2, after 1 of its batches." in done.stdout
    one, other = (ledgers.load(Path(out) / checkpoint.LEDGER) for out in ("whole", "out"))
    assert one.seen.tolist() == other.seen.tolist()
    whole, resumed = parameters("whole"), parameters("out")
    for name, value in whole.items():
        if "running" not in name:  # FSDP2 leaves batch norm's statistics to each rank
            torch.testing.assert_close(resumed[name], value, msg=f"{name} differs")


@pytest.mark.parametrize("mode", ["local", pytest.param("topk", marks=pytest.mark.slow)])
def test_a_run_whose_gradients_travel_otherwise_is_resumed_to_the_bit(mode: str):
    given = options(sync=mode, checkpoint_every=3, lr=0.02)
    assert two_ranks(*given, "--out=whole").returncode == 0
    assert two_ranks(*given, END_BY="SIGKILL:5").returncode != 0
    done = two_ranks(*given, "--resume")
    assert done.returncode == 0, done.stderr
    whole, resumed = parameters("whole"), parameters("out")
    averaged = [name for name in whole if "running" in name]  # buffers travel in 16 bits, from another anchor
    assert all(torch.equal(resumed[name], value) for name, value in whole.items() if name not in averaged)
    for name in averaged:
        torch.testing.assert_close(resumed[name], whole[name], rtol=0.02, atol=0.02)


ONCE = 'if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and name and'
"""Condition of a model that ends its process in the first try alone."""


def torchrun(*given: str, **more: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *given, "-m", "salience", *options(checkpoint_every=1)],
        env=environment(END_BY="SIGKILL:4", **more), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def test_ranks_that_torchrun_restarts_go_on_from_the_checkpoint():
    Path("finishing.py").write_text(FACTORY.replace("if name and", ONCE))
    agent = torchrun("--standalone", "--nproc-per-node=2", "--max-restarts=1")
    said, trouble = agent.communicate(timeout=300)
    assert agent.returncode == 0, trouble
    assert "Going on at epoch 1, after 3 of its batches." in said
    assert seen("out") == {2}


def test_a_node_that_is_lost_under_torchrun_leaves_the_rest_of_the_window_to_the_others():
    """Two nodes; the second one's rank and its torchrun are killed in mid-epoch, and the first goes on alone."""
    alone = FACTORY.replace("if name and", ONCE).replace(
        "os.kill(os.getpid()", "os.kill(os.getppid(), signal.SIGKILL); os.kill(os.getpid()"
    )
    Path("finishing.py").write_text(alone)
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    where = ("--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=lost", "--local-addr=127.0.0.1")
    patience = "last_call_timeout=5,keep_alive_interval=1,keep_alive_max_attempt=3"
    nodes = [
        torchrun("--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=1", *where, f"--rdzv-conf=is_host={host},{patience}")
        for host in ("true", "false")
    ]  # fmt: skip
    said = [node.communicate(timeout=300) for node in nodes]
    assert nodes[0].returncode == 0, said[0][1]
    assert nodes[1].returncode == -signal.SIGKILL
    assert "The run was saved on 2 ranks and goes on with 1" in said[0][0]
    assert "Going on at epoch 1, after 3 of its batches." in said[0][0]
    assert seen("out") == {2}, "every image once in each epoch"


# --- what does not go together, and what does nothing ---


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"zero": 4}, "train.zero is 4; it must be 0"),
        ({"zero": 2, "sync": "bf16"}, "leaves the exchange of gradients to FSDP2"),
        ({"zero": 1, "sync": "local"}, "ranks may take steps of their own"),
        ({"zero": 1, "sync": "auto"}, "ranks may take steps of their own"),
        ({"sync": "bf15"}, "Did you mean 'bf16'?"),
    ],
)
def test_options_that_do_not_go_together_get_one_sentence(
    given: dict[str, Any], said: str, capsys: pytest.CaptureFixture[str]
):
    assert main(options(**given)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line
    assert not Path("out").exists()


def test_options_that_go_together_are_taken():
    for given in ({"zero": 1, "sync": "bf16"}, {"zero": 3, "balance": True}, {"sync": "local", "balance": True}):
        check(TrainConfig(**given))
    with pytest.raises(ConfigError):
        check(TrainConfig(zero=3, sync="topk"))


def test_a_single_process_says_once_what_it_ignores(capsys: pytest.CaptureFixture[str]):
    assert main([*options(sync="bf16", zero=1, epochs=1), "--balance"]) == 0
    said = capsys.readouterr().out
    assert said.count("--balance and --sync bf16 and --zero 1 do nothing in a single process") == 1
    assert said.count("in a single process") == 1
    assert useless(TrainConfig()) == ""


def test_a_batch_that_cannot_be_divided_is_refused_on_two_ranks():
    done = two_ranks(*options(batch_size=7))
    assert "--batch-size 7 cannot be divided among 2 ranks" in done.stderr
