"""Every error salience raises on purpose, as one tree.

    SalienceError
    ├── ConfigError       (ValueError)    an option is wrong: unknown name, value out of range
    ├── DataError         (ValueError)    the data set or a file in it cannot be used
    │   └── BrokenSample                  one sample cannot be read or decoded
    ├── StoreError        (OSError)       a store cannot be reached, or refuses
    ├── LossError         (ValueError)    what was passed to loss() or pick() does not fit the batch
    │   └── Misattributed                 the losses do not belong to the most recent batch
    ├── StateError        (RuntimeError)  a checkpoint, ledger or trace does not fit this run
    ├── RankError         (RuntimeError)  a rank did not take part in a collective, or was lost
    ├── PluginError       (RuntimeError)  a plug-in is unknown, doubled, or broke its contract
    └── MissingExtra      (ImportError)   an optional dependency is needed and not installed

Each subclasses the built-in a caller would catch anyway. A message says what happened, the value, what is allowed,
and what to do. No message holds the password of a URL: `without_secrets` takes it out of every error.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

MASK = "***"
"""Replaces the user, password or query of a URL."""
# With a colon before it, any @ may end a password, which people forget to quote; without one, only an @ of the host does.
_USER = re.compile(r"://(?:[^\s'\"<>]*:[^\s'\"<>]*|[^\s'\"<>/?#]*)@")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")
"""Control characters except tab and newline, and characters that change the direction of text."""
_QUERY = re.compile(r"(://[^\s'\"<>?]*\?)[^\s'\"<>]+")
_QUERY_OF_PATH = re.compile(r"((?<![^\s'\"<>=(])/[^\s'\"<>?]*\?)(?!\*)[^\s'\"<>]*=[^\s'\"<>]*")
"""The query of a URL whose host is left out, as libraries do in their errors."""


def without_secrets(text: str) -> str:
    """The text with the user, password and query of every URL masked; what has none in it stays as it is."""
    if "://" in text:
        text = _QUERY.sub(rf"\1{MASK}", _USER.sub(f"://{MASK}@", text))
    return _QUERY_OF_PATH.sub(rf"\1{MASK}", text) if "?" in text else text


def printable(text: str) -> str:
    """The text made safe to show: control characters and bytes that are not UTF-8 are escaped, passwords of URLs are masked."""
    shown = _CONTROL.sub(lambda found: ascii(found[0])[1:-1], without_secrets(text))
    return shown.encode("utf-8", "backslashreplace").decode("utf-8")


class SalienceError(Exception):
    """Base of all errors raised by salience."""

    def __init__(self, *args: object) -> None:
        super().__init__(*(without_secrets(one) if isinstance(one, str) else one for one in args))


class ConfigError(SalienceError, ValueError):
    """An option is unknown or has a value that is not allowed."""


class DataError(SalienceError, ValueError):
    """A data set, or a file in it, cannot be used."""


class BrokenSample(DataError):
    """One sample cannot be read or decoded."""


class StoreError(SalienceError, OSError):
    """A store cannot be reached, or refuses access; its contents may be intact."""


class LossError(SalienceError, ValueError):
    """Losses, logits or targets do not fit the batch they were passed for."""


class Misattributed(LossError):
    """Losses were recorded for another batch than the one they were computed from."""


class StateError(SalienceError, RuntimeError):
    """Saved state does not belong to this run, or is damaged."""


class RankError(SalienceError, RuntimeError):
    """A rank did not take part in a collective in time, or was lost."""


class PluginError(SalienceError, RuntimeError):
    """A plug-in is unknown, registered twice, or broke its contract."""


class MissingExtra(SalienceError, ImportError):
    """An optional dependency is not installed."""

    @classmethod
    def of(cls, package: str, extra: str, purpose: str) -> MissingExtra:
        return cls(f"{purpose} needs {package!r}, which is not installed: pip install 'salience[{extra}]'")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of a message that names the nearest known names, then all of them: ' Did you mean ...? Known: ...'."""
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=2)
    hint = f" Did you mean {' or '.join(repr(n) for n in near)}?" if near else ""
    return f"{hint} Known: {', '.join(names) or 'none'}."
