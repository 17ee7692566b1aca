"""CONTRIBUTING.md names things that exist, and tells the way of a sample as it is."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path
from types import FrameType

import torch
import torch.nn.functional as F

import salience

ROOT = Path(__file__).parent.parent
FILES = {path: ast.parse(path.read_text()) for path in Path(salience.__file__).parent.rglob("*.py")}


def names() -> set[str]:
    """Every class, function, constant, method and field of the package: `Ledger`, `finish`, `MODES`, `Ledger.record`."""
    found = set()
    for tree in FILES.values():
        for node in tree.body:
            if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
                found.add(node.name)
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            found |= {target.id for target in targets if isinstance(target, ast.Name)}
            if isinstance(node, ast.ClassDef):
                found |= {f"{node.name}.{item.name}" for item in node.body if isinstance(item, ast.FunctionDef)}
                fields = (item.target for item in node.body if isinstance(item, ast.AnnAssign))
                found |= {f"{node.name}.{field.id}" for field in fields if isinstance(field, ast.Name)}
    return found


def walk() -> str:
    return (ROOT / "CONTRIBUTING.md").read_text().split("## How one sample travels")[1].split("\n## ")[0]


def steps() -> list[list[str]]:
    """The functions and methods named in each step of the walk; those of the protocol `Part` are its parts'."""
    found = []
    for step in re.split(r"\n\d\. ", walk().split("\n| to add")[0])[1:]:
        named = re.findall(r"`([A-Za-z]+\.[A-Za-z_]+|[a-z]+_[a-z_]+)`", step)
        found.append(
            [name for name in named if not name.startswith(("Part.", "salience.")) and not name.endswith(".py")]
        )
    return found


def entered(folder: Path, *, peeks: bool = False, **options: object) -> dict[str, int]:
    """The functions of salience that a small run enters, each with its place among them."""
    torch.manual_seed(0)
    for i in range(96):
        path = folder / str(i % 3) / f"{i:03d}.bin"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(torch.randn(8).numpy().tobytes())
    data = salience.Source(str(folder), decode=lambda raw: torch.frombuffer(bytearray(raw), dtype=torch.float32))
    loader, model = salience.Loader(data, 16, epochs=3, **options), torch.nn.Linear(8, 3)
    found: dict[str, int] = {}

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(str(Path(salience.__file__).parent)):
            found.setdefault(frame.f_code.co_qualname, len(found))

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        for _ in range(3):
            for x, y in loader:
                logits = model(x)
                loader.loss(F.cross_entropy(logits, y, reduction="none"), logits, y)
                if peeks:
                    next(iter(loader))
    finally:
        sys.setprofile(before)
    return found


def test_a_sample_travels_as_the_walk_says(tmp_path):
    stages = [salience.Stage(lambda x: 2 * x, random=False, name="double"), lambda x: x + 1]
    everything = entered(tmp_path / "a", select="default", cache="1MiB", augment=stages, treat="reuse")
    observing = entered(tmp_path / "b", peeks=True)
    only_between_ranks = {"Balancing.divide", "check_equal"}
    missing = [name for names in steps() for name in names if name not in everything | observing]
    assert set(missing) == only_between_ranks
    first = [min(everything[name] for name in names if name in everything) for names in steps()]
    *way, _, last = first  # statistics of small batches (7) are made when the window is closed (8), or before
    assert way == sorted(way)
    assert way[-1] < last


def test_the_walk_names_functions_that_exist():
    named = [name for name in re.findall(r"`([A-Za-z_.]+)`", walk()) if name[0].isupper() or "_" in name]
    assert len(named) > 25
    missing = sorted({name for name in named if name not in names() and name != "DataLoader"})
    assert not missing


def test_every_room_of_the_map_is_there():
    table = (ROOT / "CONTRIBUTING.md").read_text().split("## The map of the house")[1].split("\n## ")[0]
    places = re.findall(r"\| ([^|]*)\|\n", table)[2:]
    files = {place for cell in places for place in re.findall(r"`([a-z_/]+(?:\.py)?)`", cell)}
    assert len(files) > 15
    missing = [file for file in sorted(files) if not (Path(salience.__file__).parent / file).exists()]
    assert not missing


def test_every_file_that_is_named_is_there():
    text, root = (ROOT / "CONTRIBUTING.md").read_text(), Path(salience.__file__).parent
    named = set(re.findall(r"`([a-z_/]+\.py)`", text))
    assert len(named) > 25
    places = (root, root / "select", ROOT)
    assert not [name for name in sorted(named) if not any((place / name).exists() for place in places)]
