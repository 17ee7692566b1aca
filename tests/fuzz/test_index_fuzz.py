"""Damaged indexes and tars, 2,000 of each: what is read is right, or one of our errors says why not, in little memory."""

from __future__ import annotations

import io
import tarfile
import tracemalloc
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from xxhash import xxh3_64_intdigest

from salience.errors import SalienceError
from salience.feed.headers import TAR_BLOCK_BYTES
from salience.feed.index import COLUMN_TYPES, FILE, Index, Names
from salience.feed.pack import PackSettings, pack
from salience.feed.reads import Broken
from salience.feed.source import Source
from salience.feed.tars import index_tars

MUTATIONS = 2000
MAX_PEAK_BYTES = 32 << 20
HUGE = (-(2**63), -(2**31), -2, -1, 0, 1, 2**31 - 1, 2**31, 2**40, 2**62, 2**63 - 1)


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    for i in range(12):
        path = tmp_path / "data" / ("cat", "dog", "emu")[i % 3] / f"{i}.bin"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes([i]) * (40 * i))
    pack(tmp_path / "data", tmp_path / "out", PackSettings(shard_size=8192))
    return tmp_path / "out"


@pytest.fixture
def peak() -> Iterator[None]:
    """No more memory than a small file deserves."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < MAX_PEAK_BYTES
    finally:
        tracemalloc.stop()


def flipped(data: bytes, rng: np.random.Generator) -> bytes:
    """A few bytes changed, or a piece cut out, doubled or lost from the end."""
    a, b = sorted(rng.integers(0, len(data), 2).tolist())
    kind = rng.integers(4)
    if kind == 0:
        return data[:a]
    if kind == 1:
        return data[:a] + data[b:]
    if kind == 2:
        return data[:b] + data[a:b] + data[b:]
    changed = bytearray(data)
    for _ in range(int(rng.integers(1, 5))):
        changed[rng.integers(len(data))] = rng.integers(256)
    return bytes(changed)


def other_array(array: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Another number in a column, or another length, type, order or shape."""
    kind = rng.integers(7)
    if kind < 3 and array.size and array.dtype.kind in "iu":
        found = array.copy()
        wanted = int(rng.choice(np.array(HUGE, dtype=object))) if kind else int(rng.integers(0, 2000))
        limits = np.iinfo(found.dtype)
        found.flat[rng.integers(found.size)] = min(max(wanted, int(limits.min)), int(limits.max))
        return found
    if kind == 3:
        return array[: rng.integers(array.size + 1)] if array.ndim else np.repeat(array, 2)
    if kind == 4:
        return (
            array.astype(rng.choice(["float64", "int8", "U9", ">i8", "uint64"]))
            if array.dtype.kind != "U"
            else np.zeros(3)
        )
    if kind == 5:
        return rng.permutation(array) if array.ndim else np.array("salience-index-0")
    return np.tile(array, (2, 1)) if rng.integers(2) else array.reshape(-1)[:0]


def with_array(data: bytes, rng: np.random.Generator) -> bytes:
    """The index with one array changed and written anew, or with a header that promises another one."""
    with np.load(io.BytesIO(data)) as file:
        arrays = {name: file[name] for name in file.files}
    name = str(rng.choice(list(arrays)))
    kind = rng.integers(5)
    if kind == 0:
        del arrays[name]
    elif kind > 1:
        arrays[name] = other_array(arrays[name], rng)
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED if rng.integers(20) == 0 else zipfile.ZIP_STORED) as file:
        for each, array in arrays.items():
            member = io.BytesIO()
            np.save(member, array)
            text = member.getvalue()
            if kind == 1 and each == name:
                shape = f"({rng.choice(np.array([0, 3, 10**9, 10**15, 10**18, 10**30], dtype=object))},), }}"
                head, _, rest = text.partition(b"'shape': (")
                text = head + b"'shape': " + shape.encode() + rest.partition(b"}")[2][len(shape) - 8 :]
            file.writestr(f"{each}.npy", text)
    return out.getvalue()


@pytest.mark.usefixtures("peak")
def test_a_damaged_index_is_refused_or_leads_to_the_bytes_it_has_checksums_of(packed: Path):
    data, rng = (packed / FILE).read_bytes(), np.random.default_rng(14)
    read = broken = 0
    said: list[str] = []
    for k in range(MUTATIONS):
        changed = flipped(data, rng) if k % 4 == 0 else with_array(data, rng)
        try:
            index = Index.load("x.npz", changed)
            found = Source(packed, index=index).read(range(len(index)))
        except SalienceError as error:
            said.append(str(error))
            continue
        read += 1
        for part, check, size in zip(found, index.check.tolist(), index.size.tolist(), strict=True):
            if isinstance(part, Broken):
                broken += 1
            else:
                assert len(part) == size
                assert check == 0 or size == 0 or xxh3_64_intdigest(part) == check
    assert len(said) > MUTATIONS / 4
    assert max(map(len, said)) < 500
    assert read > MUTATIONS / 20
    assert broken


def test_every_column_of_an_index_is_looked_at(packed: Path):
    with np.load(packed / FILE) as file:
        arrays = {name: file[name] for name in file.files}
    assert set(arrays) == {*COLUMN_TYPES, "format"}
    for name in COLUMN_TYPES:
        for wrong in (
            {**arrays, name: arrays[name].astype(np.float64)},
            {k: v for k, v in arrays.items() if k != name},
        ):
            out = io.BytesIO()
            np.savez(out, **wrong)
            with pytest.raises(SalienceError, match=f"'{name}' is missing or not"):
                Index.load("x.npz", out.getvalue())


@pytest.mark.parametrize("ends", [[0, 5, 3, 6], [1, 2, 3, 6], [0, 2, 4, 5], [0, 2, 4, 7], [0, -1, 4, 6]])
def test_names_that_overlap_or_are_cut_off_are_refused(ends: list[int]):
    with pytest.raises(SalienceError, match="overlap or are cut off"):
        Names(joined=np.zeros(6, np.uint8), ends=np.array(ends)).checked("x.npz")


# ---------------------------------------------------------------- tars


def tar_of(form: int) -> bytes:
    """Six samples, with long and odd names where the format has them."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=form) as archive:
        for i in range(6):
            odd = form != tarfile.USTAR_FORMAT and {3: "ü", 4: "x" * 120}.get(i)
            name = f"{'ab'[i % 2]}/{i}{odd or ''}"
            for suffix, text in ((".bin", b"data" * 30 * i), (".cls", str(i % 2).encode())):
                info = tarfile.TarInfo(name + suffix)
                info.size = len(text)
                if form == tarfile.PAX_FORMAT and i == 2:
                    info.pax_headers = {"comment": "x" * 600}
                archive.addfile(info, io.BytesIO(text))
    return out.getvalue()


FIELDS = {
    "name": (0, 100),
    "size": (124, 136),
    "checksum": (148, 156),
    "kind": (156, 157),
    "magic": (257, 265),
    "prefix": (345, 500),
}
WRONG = (
    b"-0000001000\0", b"77777777777\0", b"\xff" * 12, b"\x80" + b"\xff" * 11, b"0_0", b"+1", b"", b"../../etc/x", b"/etc/x",
    b"a\0b", b"\xff\xfe", b"x", b"g", b"L", b"K", b"S", b"1", b"5", b"9" * 100, b"12 size=-77\n",
)  # fmt: skip


def other_header(data: bytes, rng: np.random.Generator) -> bytes:
    """One field of a header, or the text of a pax header, changed, under a checksum that fits."""
    at = int(rng.integers(len(data) // TAR_BLOCK_BYTES)) * TAR_BLOCK_BYTES
    block = bytearray(data[at : at + TAR_BLOCK_BYTES])
    start, stop = FIELDS[str(rng.choice(list(FIELDS)))]
    wrong = WRONG[rng.integers(len(WRONG))]
    block[start:stop] = wrong[: stop - start].ljust(stop - start, b"\0" if rng.integers(2) else b" ")
    if rng.integers(8):
        block[148:156] = b"%06o\0 " % (sum(block[:148]) + sum(block[156:]) + 8 * ord(" "))
    return data[:at] + bytes(block) + data[at + TAR_BLOCK_BYTES :]


@pytest.mark.usefixtures("peak")
def test_a_damaged_tar_is_refused_or_indexed_within_its_bytes(tmp_path: Path):
    rng = np.random.default_rng(41)
    tars = [tar_of(form) for form in (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT)]
    read = 0
    said: list[str] = []
    for k in range(MUTATIONS):
        data = tars[k % 3]
        (tmp_path / "x.tar").write_bytes(flipped(data, rng) if k % 4 == 0 else other_header(data, rng))
        try:
            index = index_tars([tmp_path / "x.tar"], checksums=k % 2 == 0, jobs=1)
            index.validate("x.tar")
        except SalienceError as error:
            said.append(str(error))
            continue
        read += 1
        for part, size in zip(Source(tmp_path, index=index).read(range(len(index))), index.size.tolist(), strict=True):
            assert isinstance(part, bytes)
            assert len(part) == size
    assert len(said) > MUTATIONS / 10
    assert max(map(len, said)) < 500
    assert read > MUTATIONS / 10
