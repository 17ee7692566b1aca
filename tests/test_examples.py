"""Every example runs, from nothing, in a folder of its own."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import runpy
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from conftest import require

EXAMPLES = Path(__file__).parents[1] / "examples"
SCRIPTS = sorted(EXAMPLES.glob("*.py"))
PACKAGES = ("lightning", "transformers", "accelerate", "PIL")
SLOW = {"signs", "plain", "two_ranks", "two_nodes", "transformers_run"}
NODES = {"two_ranks": 1, "two_nodes": 2}


def needs(text: str) -> set[str]:
    found = set(re.findall(rf"^(?:from|import) ({'|'.join(PACKAGES)})\b", text, flags=re.M))
    return found | ({"PIL"} if "glyphs" in text else set())


MARKED = [pytest.param(path, id=path.stem, marks=pytest.mark.slow if path.stem in SLOW else ()) for path in SCRIPTS]


def torchrun(script: Path, nodes: int) -> None:
    """Run a script on two ranks, of one node or of two: a host name of its own, where that is allowed, makes another node."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        where = ["--master-addr", "127.0.0.1", "--master-port", str(free.getsockname()[1])]
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nnodes",
        str(nodes),
        "--nproc-per-node",
        str(2 // nodes),
    ]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    own_name = ["unshare", "--uts", "sh", "-c", 'hostname node-b && exec "$@"', "-"]
    renames = shutil.which("unshare") and subprocess.run([*own_name, "true"], capture_output=True).returncode == 0
    of_node = [[*(own_name if k and renames else ()), *command, "--node-rank", str(k)] for k in range(nodes)]
    started = [subprocess.Popen([*words, *where, str(script)], env=env) for words in of_node]
    try:
        assert [process.wait(timeout=120) for process in started] == [0] * nodes
    finally:
        for process in started:
            process.kill()


@pytest.mark.parametrize("script", MARKED)
@pytest.mark.filterwarnings("ignore:.*does not have many workers", "ignore:.*LeafSpec")
def test_an_example_runs(script, tmp_path, monkeypatch, capfd):
    for package in needs(script.read_text()):
        require(importlib.util.find_spec(package) is not None, package)
    monkeypatch.chdir(tmp_path)
    if script.stem in NODES:
        torchrun(script, NODES[script.stem])
    else:
        with torch.random.fork_rng():
            runpy.run_path(str(script), run_name="__main__")
    assert "visits" in capfd.readouterr().out


def test_the_notebook_runs(capsys):
    cells = json.loads((EXAMPLES / "notebook.ipynb").read_text())["cells"]
    names: dict[str, object] = {}
    for cell in cells:
        assert not cell.get("outputs"), "a notebook is committed without outputs"
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), names)
    assert "5,000 visits" in capsys.readouterr().out


def test_every_example_is_in_the_list():
    text = (EXAMPLES / "README.md").read_text()
    missing = [path.name for path in [*SCRIPTS, EXAMPLES / "notebook.ipynb"] if f"]({path.name})" not in text]
    assert not missing
