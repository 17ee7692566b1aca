"""Converts events to JSON objects and back: the dataclass says which fields there are and what each must be.

A field's `metadata` may give it another name in JSON ("json"), or make it hold all other fields ("rest").
"""

from __future__ import annotations

import math
import types
from collections.abc import Mapping
from dataclasses import MISSING, Field, asdict, fields, is_dataclass
from functools import cache
from typing import Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

import numpy as np

from salience.errors import did_you_mean, without_secrets
from salience.events.kinds import KINDS, EventData

T = TypeVar("T")


class Malformed(ValueError):
    """A field is missing, unknown, or not what it should be."""


def encode(data: EventData) -> dict[str, Any]:
    """The fields as plain JSON values; numbers that are not finite become null."""
    found: dict[str, Any] = {}
    for one in fields(data):
        value = plain(getattr(data, one.name))
        found.update(value if one.metadata.get("rest") else {_key(one): value})
    return found


def decode(kind: str, given: Mapping[str, Any], *, strict: bool = False) -> EventData:
    """The event of that kind. `strict` refuses unknown fields and accepts null for a number that was not finite."""
    if kind not in KINDS:
        raise Malformed(f"There is no event of kind {kind!r}.{did_you_mean(kind, KINDS)}")
    return cast("EventData", _object(KINDS[kind], given, kind, strict))


def build(wanted: type[T], given: Any) -> T:
    """An instance of any dataclass from plain JSON values; unknown fields are ignored."""
    return cast("T", _object(wanted, given, wanted.__name__, strict=False))


def plain(value: Any) -> Any:
    """JSON values: lists for tuples and arrays, null for numbers not finite, text for other types; no passwords in URLs."""
    if isinstance(value, np.ndarray):
        return plain(value.tolist())
    if isinstance(value, np.generic):
        return plain(value.item())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if is_dataclass(value) and not isinstance(value, type):
        return plain(asdict(value))
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}  # pyright: ignore[reportUnknownVariableType,reportUnknownArgumentType]
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]  # pyright: ignore[reportUnknownVariableType]
    if value is None or isinstance(value, int):
        return value
    return without_secrets(str(value))


def _object(wanted: type[Any], given: Any, what: str, strict: bool) -> Any:
    if not isinstance(given, Mapping):
        raise Malformed(f"{what} is {given!r}, not an object.")
    rest = dict(cast("Mapping[str, Any]", given))
    hints, values, collects = _hints(wanted), cast("dict[str, Any]", {}), ""
    for one in fields(wanted):
        key = _key(one)
        if one.metadata.get("rest"):
            collects = one.name
        elif key in rest:
            values[one.name] = _value(hints[one.name], rest.pop(key), f"{what}.{key}", strict)
        elif one.default is MISSING and one.default_factory is MISSING:
            raise Malformed(f"{what} lacks {key!r}.")
    if collects:
        values[collects] = {
            key: value for key, value in rest.items() if value is None or isinstance(value, (int, float))
        }
    elif rest and strict:
        unknown = next(iter(rest))
        raise Malformed(f"{what} has no field {unknown!r}.{did_you_mean(unknown, map(_key, fields(wanted)))}")
    return wanted(**values)


def _value(hint: Any, value: Any, what: str, strict: bool) -> Any:
    origin, of = get_origin(hint), get_args(hint)
    if hint is Any:
        return value
    if origin in (Union, types.UnionType):
        if value is None and type(None) in of:
            return None
        for one in of:
            try:
                return _value(one, value, what, strict)
            except Malformed:
                continue
    elif is_dataclass(hint):
        return _object(cast("type[Any]", hint), value, what, strict)
    elif origin is tuple and isinstance(value, list):
        items = cast("list[Any]", value)
        kinds = [of[0]] * len(items) if of[-1] is ... else of
        if len(kinds) == len(items):
            return tuple(_value(kind, item, what, strict) for kind, item in zip(kinds, items, strict=True))
    elif origin is Mapping and isinstance(value, dict):
        table = cast("dict[str, Any]", value)
        return {key: _value(of[1], item, f"{what}.{key}", strict) for key, item in table.items()}
    elif hint is float and value is None and strict:
        return math.nan
    elif hint is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    elif hint is int and isinstance(value, (int, float)) and not isinstance(value, bool) and value == int(value):
        return int(value)
    elif hint in (str, bool) and isinstance(value, cast("type[Any]", hint)):
        return value
    raise Malformed(f"{what} is {value!r}, not {getattr(hint, '__name__', hint)}.")


def _key(one: Field[Any]) -> str:
    return one.metadata.get("json", one.name)


@cache
def _hints(wanted: type[Any]) -> dict[str, Any]:
    return get_type_hints(wanted)
