"""Saved ledgers, mutated: each is refused with a StateError or loads as a ledger that everything can read, within bounds."""

from __future__ import annotations

import io
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest

from salience import ledger as ledgers
from salience.errors import StateError
from salience.ledger import COLUMNS, Ledger
from salience.select import Pipeline, preset
from salience.select.findings import findings

N, MUTATIONS, ROUNDS, MOST_BYTES = 60, 2000, 4, 16 << 20


def saved(path: Path) -> bytes:
    rng = np.random.default_rng(0)
    ledger = Ledger(N)
    label = rng.integers(0, 3, N)
    for window in range(4):
        p = rng.dirichlet(np.ones(4), N).astype(np.float32)
        p = -np.sort(-p, axis=1)
        order = np.argsort(rng.random((N, 4)), axis=1)
        rows = {
            "loss": rng.exponential(size=N), "target": label, "margin": rng.normal(size=N), "el2n": rng.random(N),
            "entropy": rng.random(N), "confidence": p[:, 1], "guess": order[:, 0], "other": order[:, 1],
            "guess_p": p[:, 0], **{f"p_{k}": p[:, k] for k in range(4)}, **{f"class_{k}": order[:, k] for k in range(4)},
        }  # fmt: skip
        ledger.record(np.arange(N), {name: np.asarray(row, np.float32) for name, row in rows.items()}, window=window)
        ledger.course.append((0.5 - 0.05 * window, 0.3, 20.0, 0.0))
    ledger.label[:] = label
    ledgers.save(ledger, path)
    return path.read_bytes()


def damaged(whole: bytes, rng: np.random.Generator) -> bytes:
    """The bytes of a file with a few of them flipped, overwritten, cut out, doubled or cut off."""
    data = bytearray(whole)
    for _ in range(rng.integers(1, 4)):
        at, size = int(rng.integers(0, len(data))), int(rng.integers(1, 9))
        match rng.integers(0, 5):
            case 0:
                data[at] ^= 1 << int(rng.integers(0, 8))
            case 1:
                data[at : at + size] = bytes([rng.choice([0, 0xFF])]) * size
            case 2:
                del data[at : at + size]
            case 3:
                data[at:at] = data[max(0, at - size) : at]
            case _:
                del data[max(at, len(data) // 2) :]
    return bytes(data)


def rewritten(whole: bytes, rng: np.random.Generator) -> bytes:
    """A whole archive in which one array has another type, shape, name, header or other values."""
    with np.load(io.BytesIO(whole)) as file:
        arrays = {name: file[name] for name in file.files}
    name = str(rng.choice(list(arrays)))
    array, lie = arrays[name], None
    match rng.integers(0, 9):
        case 0:
            arrays[name] = np.zeros(array.shape, rng.choice(["f2", "f8", "i1", "u8", "?", "U3", "S2", "c8", "M8[s]"]))
        case 1:
            arrays[name] = array[: int(rng.integers(0, 3))] if array.ndim else array.reshape(1)
        case 2:
            arrays[name] = np.stack([array, array]) if rng.random() < 0.5 else array.reshape(-1, 1)
        case 3:
            del arrays[name]
        case 4:
            arrays[f"{name}x"] = arrays.pop(name)
        case 5:
            lie = str(rng.choice(["(1000000000000,)", "(-5,)", "(4, 99999999999)", "()", "(60, 0)", "(1e9,)", "None"]))
        case 6:
            lie = str(rng.choice(["'V0'", "'|O'", "'<f8'", "'<i9'", "[('a', '<f4')]", "'S0'"]))
        case 7 if array.dtype.kind in "fiu" and array.ndim:
            array = array.copy() if array.dtype.kind == "f" else array.astype(np.int64)
            values = [-1, -2, 2**31 - 1, 2**31, 2**40, -(2**40), 65_536] if array.dtype.kind == "i" else [
                np.nan, np.inf, -np.inf, -1.0, 2.0, 3e4, -0.0,
            ]  # fmt: skip
            array[int(rng.integers(0, len(array)))] = rng.choice(values)
            arrays[name] = array
        case _:
            arrays["format"] = np.array(str(rng.choice(["salience-ledger-0", "", "salience-plan-1"])))
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED if rng.random() < 0.05 else zipfile.ZIP_STORED) as archive:
        for key, value in arrays.items():
            member = io.BytesIO()
            np.save(member, value, allow_pickle=False)
            data = member.getvalue()
            if lie is not None and key == name:
                old = f"'shape': {value.shape}" if lie[0] in "(N" else f"'descr': '{value.dtype.str}'"
                new = f"{old.split(':')[0]}: {lie}"
                data = data.replace(old.encode(), new.encode())
            archive.writestr(f"{key}.npy", data)
    return out.getvalue()


def assert_usable(ledger: Ledger) -> None:
    assert ledger.n == N
    for name, column in COLUMNS.items():
        values = ledger[name][~np.isnan(ledger[name])] if ledger[name].dtype.kind == "f" else ledger[name]
        assert not len(values) or (values.min() >= column.low and values.max() <= column.high)
    findings(ledger)
    with np.errstate(all="ignore"):  # what was infinite may overflow
        plan = Pipeline(preset("default"), strict=True).plan(ledger, window=5, windows=10, batch_size=4, seed=0)
    assert len(plan)


@pytest.mark.parametrize("part", range(ROUNDS))
def test_a_mutated_ledger_is_refused_or_loads(tmp_path, part):
    whole = saved(tmp_path / "whole.npz")
    path, refused, loaded = tmp_path / "mutated.npz", 0, 0
    tracemalloc.start()
    try:
        for seed in range(part * MUTATIONS // ROUNDS, (part + 1) * MUTATIONS // ROUNDS):
            rng = np.random.default_rng(seed)
            path.write_bytes(damaged(whole, rng) if seed % 2 else rewritten(whole, rng))
            tracemalloc.reset_peak()
            try:
                ledger = ledgers.load(path)
            except StateError:
                refused += 1
            else:
                assert_usable(ledger)
                loaded += 1
            assert tracemalloc.get_traced_memory()[1] < MOST_BYTES, seed
    finally:
        tracemalloc.stop()
    assert refused > MUTATIONS // ROUNDS // 2
    assert loaded > 10


def test_a_refused_state_changes_nothing(tmp_path):
    saved(tmp_path / "l.npz")
    ledger = ledgers.load(tmp_path / "l.npz")
    before = ledger.state_dict()
    with pytest.raises(StateError, match=r"confidence from .* to 2\.0; allowed: 0 to 1\.01"):
        ledger.load_state_dict({**before, "seen": before["seen"] + 1, "confidence": np.full(N, 2.0, np.float16)})
    for name, column in before.items():
        np.testing.assert_array_equal(ledger.state_dict()[name], column)
