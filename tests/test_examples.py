"""Every example runs, from nothing, in a folder of its own."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import runpy
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
SLOW = {"signs", "plain", "two_ranks", "transformers_run"}


def needs(text: str) -> set[str]:
    found = set(re.findall(rf"^(?:from|import) ({'|'.join(PACKAGES)})\b", text, flags=re.M))
    return found | ({"PIL"} if "glyphs" in text else set())


MARKED = [pytest.param(path, id=path.stem, marks=pytest.mark.slow if path.stem in SLOW else ()) for path in SCRIPTS]


@pytest.mark.parametrize("script", MARKED)
@pytest.mark.filterwarnings("ignore:.*does not have many workers", "ignore:.*LeafSpec")
def test_an_example_runs(script, tmp_path, monkeypatch, capfd):
    for package in needs(script.read_text()):
        require(importlib.util.find_spec(package) is not None, package)
    monkeypatch.chdir(tmp_path)
    if script.stem == "two_ranks":
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            where = ["--master-addr", "127.0.0.1", "--master-port", str(free.getsockname()[1])]
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", *where, str(script)]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        subprocess.run(command, check=True, timeout=120, env=env)
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
