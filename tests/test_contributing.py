"""CONTRIBUTING.md names things that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

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


def test_the_walk_names_functions_that_exist():
    walk = (ROOT / "CONTRIBUTING.md").read_text().split("## How one sample travels")[1].split("\n## ")[0]
    named = [name for name in re.findall(r"`([A-Za-z_.]+)`", walk) if name[0].isupper() or "_" in name]
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
