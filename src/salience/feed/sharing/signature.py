"""Whether two jobs decode in the same way: a signature of the function, its values, and its source files.

A lambda, a closure, or an object that cannot be pickled has no signature and is not shared.
"""

from __future__ import annotations

import hashlib
import io
import pickle
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class InTurn:
    """Several functions as one."""

    calls: tuple[Callable[[Any], Any], ...]

    def __call__(self, data: Any) -> Any:
        for call in self.calls:
            data = call(data)
        return data


class _Pickler(pickle.Pickler):
    """Notes the modules of everything that is pickled by name."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=4)
        self.modules: set[str] = set()

    def reducer_override(self, obj: Any) -> Any:
        self.modules.add(getattr(obj, "__module__", None) or type(obj).__module__)
        self.modules.add(type(obj).__module__)
        return NotImplemented


def signature(decode: Any) -> str | None:
    """32 hex digits that are equal for the same code with the same values; None if that cannot be determined."""
    file = io.BytesIO()
    pickler = _Pickler(file)
    try:
        pickler.dump(decode)
    except Exception:  # whatever a class of the user's does when it is pickled
        return None
    digest = hashlib.blake2b(file.getvalue(), digest_size=16)
    for name in sorted(pickler.modules):
        digest.update(_written(name))
    return digest.hexdigest()


def _written(name: str) -> bytes:
    """A digest of the file of a module; its version if it has no file of Python code."""
    module = sys.modules.get(name)
    path = getattr(module, "__file__", None)
    if path is not None and path.endswith(".py"):
        try:
            return hashlib.blake2b(Path(path).read_bytes(), digest_size=16).digest()
        except OSError:
            pass
    top = sys.modules.get(name.partition(".")[0])
    return f"{name}\0{getattr(top, '__version__', '')}".encode()
