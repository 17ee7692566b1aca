"""`make docs` builds a site whose links lead somewhere, and `make package` what an index accepts."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import require

ROOT = Path(__file__).parents[1]


def build(folder: Path, out: Path) -> subprocess.CompletedProcess[str]:
    require(importlib.util.find_spec("material") is not None, "mkdocs-material")
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--config-file",
        str(folder / "mkdocs.yml"),
        "--site-dir",
        str(out),
    ]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=120, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    )


def test_the_site_is_built_and_a_dead_link_would_stop_it(tmp_path):
    copy = tmp_path / "copy"
    for part in ("docs", ".ci", "src"):
        shutil.copytree(ROOT / part, copy / part, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    shutil.copy(ROOT / "mkdocs.yml", copy)
    done = build(copy, tmp_path / "site")
    assert done.returncode == 0, done.stderr
    reference = (tmp_path / "site" / "reference.html").read_text()
    assert all(f'id="salience.{name}"' in reference for name in ("loader.Loader.loss", "observer.Observer.record"))
    with (copy / "docs" / "tasks.md").open("a") as page:
        page.write("\n[nowhere](nowhere.md)\n")
    done = build(copy, tmp_path / "again")
    assert done.returncode != 0
    assert "nowhere.md" in done.stderr


@pytest.mark.slow
def test_wheel_and_sdist_are_what_an_index_accepts(tmp_path):
    require(
        importlib.util.find_spec("twine") is not None and importlib.util.find_spec("build") is not None,
        "twine and build",
    )
    copy = tmp_path / "copy"
    copy.mkdir()
    shutil.copytree(ROOT / "src", copy / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(tmp_path / "dist"), str(copy)],
        check=True,
        capture_output=True,
    )
    made = sorted((tmp_path / "dist").iterdir())
    assert [path.suffix for path in made] == [".whl", ".gz"]
    subprocess.run([sys.executable, "-m", "twine", "check", "--strict", *map(str, made)], check=True)
