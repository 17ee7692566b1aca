"""`salience plugins` shows every plug-in and its origin; `salience doctor` what the machine has and lacks."""

from __future__ import annotations

import re
import tomllib
from importlib import resources
from pathlib import Path

import pytest
import torch

from salience import registry
from salience.cli import doctor, main


def test_every_plugin_is_listed_with_its_origin_and_what_it_does(capsys: pytest.CaptureFixture[str]):
    assert main(["plugins"]) == 0
    lines = [line.split(maxsplit=3) for line in capsys.readouterr().out.splitlines()[1:]]
    assert [tuple(line[:3]) for line in lines] == [
        (kind, origin.name, origin.package) for kind in registry.kinds() for origin in registry.catalogue(kind)
    ]
    assert all(len(line) == 4 for line in lines)


def test_a_broken_plugin_does_not_hide_the_others(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setitem(registry.BUILT_IN["scores"], "broken", "salience.nowhere:score")
    registry.forget_installed()
    try:
        assert main(["plugins"]) == 0
    finally:
        monkeypatch.undo()
        registry.forget_installed()
    said = capsys.readouterr().out
    assert "broken: score 'broken' of salience cannot be loaded" in said
    assert "ema_loss" in said


def test_the_doctor_says_what_there_is(capsys: pytest.CaptureFixture[str]):
    assert main(["doctor"]) == 0
    said = capsys.readouterr().out
    for name in ("salience", "python", "torch", "CPU cores", "memory", "/dev/shm", "pillow", "rich"):
        assert f"\n{name} " in "\n" + said
    assert torch.__version__.partition("+")[0] in said


def test_the_doctor_names_the_extra_that_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    found = doctor.version
    monkeypatch.setattr(doctor, "version", lambda name: None if name in ("pillow", "rich") else found(name))
    monkeypatch.setattr(doctor, "shared_memory", lambda: 64 << 20)
    assert main(["doctor"]) == 0
    said = capsys.readouterr().out
    assert "pip install 'salience[images]'" in said
    assert "pip install 'salience[cli]'" in said
    assert "docker run --shm-size=8g" in said


def test_a_healthy_machine_gets_no_advice():
    versions = {extra.package: "1" for extra in doctor.EXTRAS}
    assert doctor.advice(versions, 8 << 30) == []
    assert doctor.advice(versions, None) == []  # no /dev/shm on this system


def test_the_doctor_knows_every_optional_package_of_the_project():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    groups = {
        name: found
        for name, found in project["optional-dependencies"].items()
        if name not in ("all", "bench", "dev", "docs")
    }
    named = ((one, name) for name, found in groups.items() for one in found if not one.startswith("salience["))
    wanted = {(re.split(r"[\[<>=]", one)[0], name) for one, name in named}
    assert {(extra.package, extra.extra) for extra in doctor.EXTRAS} == wanted


def test_the_package_says_that_it_is_typed():
    assert resources.files("salience").joinpath("py.typed").is_file()
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    assert "py.typed" in project["tool"]["setuptools"]["package-data"]["salience"]
    assert "Typing :: Typed" in project["project"]["classifiers"]
