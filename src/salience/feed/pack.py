"""Pack a folder into ordinary WebDataset tar shards with a byte index beside them.

    DIR/cat/1.jpg, DIR/cat/1.txt   ->   OUT/shard-000003.tar: cat/1.jpg, cat/1.txt, cat/1.cls

    list the files -> samples -> shuffle by the seed -> fill shards -> write each (.part, then renamed) -> index.npz

The order is fixed before the first byte is written, so all offsets follow from arithmetic, shards can be written in any
order, and after a kill only the missing shards are written. OUT/pack.json says what OUT was packed from.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import stat
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt

from salience.errors import ConfigError, DataError, StateError
from salience.feed import index as indices
from salience.feed.headers import TAR_BLOCK_BYTES, TAR_END, header, header_size, padded
from salience.feed.index import TEST_SPLITS, Index, Names, check_path, classes_of, hasher
from salience.feed.tars import (
    CHUNK_BYTES,
    DEFAULT_JOBS,
    SIDECAR_SUFFIXES,
    Count,
    Progress,
    each,
    save,
    size_of,
    suffix_of,
    unreadable,
)
from salience.files import atomic
from salience.seeds import generator

PLAN_FILE = "pack.json"
FORMAT = "salience-pack-1"


class File(NamedTuple):
    """A file to pack; its path is relative to the folder."""

    path: str
    size: int
    modified: int
    """Modification time in nanoseconds."""


class PackedSample(NamedTuple):
    """A sample to pack."""

    key: str
    label: int
    files: tuple[File, ...]
    """The data first, then its sidecar files."""

    def members(self) -> list[tuple[str, int]]:
        """Name and size of each member in the tar; the class number comes last, if there is one."""
        found = [(self.key + (suffix_of(file.path) or ".bin"), file.size) for file in self.files]
        return found if self.label < 0 else [*found, (f"{self.key}.cls", len(str(self.label)))]

    def size(self) -> int:
        """Bytes that the sample occupies in a tar."""
        return sum(header_size(name) + padded(size) for name, size in self.members())


class TarShard(NamedTuple):
    """A tar to write."""

    samples: tuple[PackedSample, ...]
    size: int
    """Bytes of the tar."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PackSettings:
    """Settings that determine a packing, besides its files."""

    shard_size: int = 64 << 20
    """Maximum bytes per shard."""
    seed: int = 0
    """Seed of the order of the samples, which are shuffled so that any contiguous range mixes the classes."""

    def __post_init__(self) -> None:
        if self.seed < 0:
            raise ConfigError(f"The shuffle seed is {self.seed}; it must be at least 0.")


@dataclass(frozen=True, kw_only=True, slots=True)
class Packing:
    """Everything about the shards except their bytes."""

    settings: PackSettings
    shards: tuple[TarShard, ...]
    classes: tuple[str, ...]

    def fingerprint(self) -> str:
        """A digest of the files, their sizes and times, their order, and where shards begin."""
        whole = hashlib.sha256(repr((asdict(self.settings), self.classes)).encode())
        for shard in self.shards:
            whole.update(b"shard")
            for sample in shard.samples:
                whole.update(repr(sample).encode("utf-8", "surrogateescape"))
        return whole.hexdigest()

    def index(self, checks: Iterable[npt.NDArray[np.uint64]]) -> Index:
        """The byte index, given the checksums of each shard's samples."""
        offsets: list[int] = []
        for shard in self.shards:
            at = 0
            for sample in shard.samples:
                offsets.append(at + header_size(sample.members()[0][0]))
                at += sample.size()
        samples = [sample for shard in self.shards for sample in shard.samples]
        return Index(
            names=Names.of(sample.files[0].path for sample in samples),
            shards=tuple(_shard_name(number) for number in range(len(self.shards))),
            shard_sizes=np.array([shard.size for shard in self.shards], dtype=np.int64),
            shard=np.repeat(np.arange(len(self.shards), dtype=np.int32), [len(shard.samples) for shard in self.shards]),
            offset=np.array(offsets, dtype=np.int64),
            size=np.array([sample.files[0].size for sample in samples], dtype=np.int64),
            check=np.concatenate(list(checks)),
            label=np.array([sample.label for sample in samples], dtype=np.int32),
            classes=self.classes,
        )


# ---------------------------------------------------------------- the plan


def list_files(folder: Path) -> list[File]:
    """All files below `folder`, sorted by path, without hidden ones; links are followed."""
    found: list[File] = []
    todo, seen = [""], set[tuple[int, int]]()  # links may form a circle
    while todo:
        here = todo.pop()
        path = folder / here
        try:
            status = path.stat()
            if stat.S_ISDIR(status.st_mode):
                if (status.st_dev, status.st_ino) not in seen:
                    seen.add((status.st_dev, status.st_ino))
                    todo += [
                        f"{here}/{name}" if here else name for name in os.listdir(path) if not name.startswith(".")
                    ]
            elif stat.S_ISREG(status.st_mode):
                found.append(File(here, status.st_size, status.st_mtime_ns))
            else:
                raise DataError(f"{path} is neither a file nor a folder; remove it.")
        except OSError as cause:
            raise unreadable(path, cause) from cause
    return sorted(found)


def samples_of(files: Sequence[File]) -> tuple[list[PackedSample], tuple[str, ...]]:
    """The samples and their classes: one sample per file, except that .txt and .json belong to the file of the same name.

    A WebDataset key ends at the first dot: dots of the name become underscores, and a number keeps keys apart.
    """
    stems: dict[str, list[File]] = {}
    for file in files:
        if suffix_of(file.path).lower() == ".cls":
            raise DataError(
                f"{file.path} would take the place of the class number that pack writes; remove .cls files."
            )
        stems.setdefault(file.path.removesuffix(suffix_of(file.path)), []).append(file)
    groups: list[tuple[str, tuple[File, ...]]] = []
    for stem, group in stems.items():
        data = [file for file in group if suffix_of(file.path).lower() not in SIDECAR_SUFFIXES] or group[-1:]
        beside = [file for file in group if file not in data]
        groups += [(stem, (file, *(beside if file is data[0] else ()))) for file in data]
    classes, labels = classes_of([group[0].path for _, group in groups])
    taken: set[str] = set()
    samples: list[PackedSample] = []
    for (stem, group), label in zip(groups, labels.tolist(), strict=True):
        folder, slash, base = stem.rpartition("/")
        key = first = folder + slash + base.replace(".", "_")
        number = 1
        while key in taken:
            number += 1
            key = f"{first}-{number}"
        taken.add(check_path(key, "The folder"))
        samples.append(PackedSample(key, label, group))
    return samples, classes


def plan(folder: Path, settings: PackSettings) -> Packing:
    """Decide which sample goes into which shard."""
    if not folder.is_dir():
        raise DataError(f"There is no folder {folder}; check the path.")
    split = [name for name in ("train", *TEST_SPLITS) if (folder / name).is_dir()]
    if len(split) > 1 and split[0] == "train":
        raise DataError(
            f"{folder} has the splits {', '.join(split)}, which must not mix; pack each on its own: {folder}/train."
        )
    samples, classes = samples_of(list_files(folder))
    if not samples:
        raise DataError(f"{folder} holds no files to pack; give a folder with files, in a directory for each class.")
    order = generator(settings.seed, *b"pack").permutation(len(samples))
    return Packing(settings=settings, shards=fill([samples[i] for i in order], settings.shard_size), classes=classes)


def fill(samples: Sequence[PackedSample], shard_size: int) -> tuple[TarShard, ...]:
    """Fill shards with samples in order, as many per shard as fit into `shard_size` bytes."""
    shards: list[TarShard] = []
    inside: list[PackedSample] = []
    full = len(TAR_END)
    for sample in samples:
        size = sample.size()
        if size + len(TAR_END) > shard_size:
            raise ConfigError(
                f"The shard size is {shard_size:,} bytes, and {sample.files[0].path} alone takes {size + len(TAR_END):,} in a"
                " tar; give a larger --shard-size."
            )
        if full + size > shard_size:
            shards.append(TarShard(tuple(inside), full))
            inside, full = [], len(TAR_END)
        inside.append(sample)
        full += size
    return (*shards, TarShard(tuple(inside), full))


# ---------------------------------------------------------------- writing


def pack(
    folder: str | Path,
    out: str | Path,
    settings: PackSettings,
    *,
    jobs: int = DEFAULT_JOBS,
    progress: Progress | None = None,
) -> Index:
    """Write the shards of `folder` that are not yet in `out`, then the index."""
    folder, out = Path(folder).resolve(), Path(out).resolve()
    hasher()  # raises now if it is not installed
    if out.is_relative_to(folder):
        raise ConfigError(f"{out} is inside {folder}, which would pack its own shards; choose a folder outside.")
    packing = plan(folder, settings)

    def task(number: int, count: Count) -> npt.NDArray[np.uint64]:
        return write_shard(folder, out / _shard_name(number), packing.shards[number], count)

    with _begin(out, packing):
        if (out / indices.FILE).exists():
            index = _finished(out)
        else:
            total = sum(shard.size for shard in packing.shards)
            index = packing.index(each(task, range(len(packing.shards)), jobs, total, progress))
            save(index, out)
        for name in index.shards:
            _checks(out / name).unlink(missing_ok=True)
    return index


def write_shard(folder: Path, path: Path, shard: TarShard, count: Count) -> npt.NDArray[np.uint64]:
    """Write a shard unless it exists; returns the checksums of its samples, uint64.

    The checksum file and the shard are each complete or absent, and the shard appears last.
    """
    if (there := size_of(path)) is not None:
        if there != shard.size or size_of(_checks(path)) != 8 * len(shard.samples):
            raise StateError(f"{path} is not the shard that pack wrote; remove it and run the same command again.")
        count(shard.size)
        return np.fromfile(_checks(path), dtype=np.uint64)
    part, checks = path.with_suffix(".tar.part"), np.zeros(len(shard.samples), dtype=np.uint64)
    try:
        with atomic(path, part=part) as out:
            for i, sample in enumerate(shard.samples):
                checks[i] = _write_sample(folder, sample, out)
                count(sample.size())
            out.write(TAR_END)
            with atomic(_checks(path), part=path.with_suffix(".check.part")) as beside:
                beside.write(checks.tobytes())
    except OSError as cause:  # errors of reading are DataErrors by now
        raise DataError(
            f"{part} cannot be written: {cause.strerror or cause}; make room, then run the same command again:"
            " whole shards are kept."
        ) from cause
    return checks


def _write_sample(folder: Path, sample: PackedSample, out: BinaryIO) -> int:
    """Write all members of a sample; returns the checksum of its data."""
    named = sample.members()
    checks: list[int] = []
    for file, (name, size) in zip(sample.files, named, strict=False):
        out.write(header(name, size))
        checks.append(_copy(folder / file.path, size, out))
    if sample.label >= 0:
        out.write(header(*named[-1]) + str(sample.label).encode().ljust(TAR_BLOCK_BYTES, b"\0"))
    return checks[0]


def _copy(path: Path, size: int, out: BinaryIO) -> int:
    """Copy a file into a tar, padded; returns its checksum."""
    check, done = hasher()(), 0
    for chunk in _chunks(path):
        out.write(chunk)
        check.update(chunk)
        done += len(chunk)
    if done != size:
        raise DataError(
            f"{path} changed while it was packed, from {size:,} to {done:,} bytes; pack again when it no longer changes."
        )
    out.write(bytes(padded(size) - size))
    return check.intdigest()


def _chunks(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb", buffering=0) as file:
            while chunk := file.read(CHUNK_BYTES):
                yield chunk
    except OSError as cause:
        raise unreadable(path, cause) from cause


# ---------------------------------------------------------------- going on after a kill


@contextmanager
def _begin(out: Path, packing: Packing) -> Generator[None]:
    """Record in `out` what is being packed, or check that it is the same; no other pack may write there meanwhile."""
    said = {"format": FORMAT, **asdict(packing.settings), "fingerprint": packing.fingerprint()}
    try:
        out.mkdir(parents=True, exist_ok=True)
        if not (out / PLAN_FILE).exists():
            part = out / f"{PLAN_FILE}.part"
            foreign = sorted(set(os.listdir(out)) - {part.name})
            if foreign:
                raise StateError(
                    f"{out} holds files that pack did not write ({foreign[0]} for one); choose an empty folder."
                )
            with atomic(out / PLAN_FILE, part=part) as file:
                file.write((json.dumps(said, indent=1) + "\n").encode())
        opened = (out / PLAN_FILE).open("r+")
    except OSError as cause:
        raise DataError(f"{out} cannot be written to: {cause.strerror}; choose another folder.") from cause
    with opened:
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as cause:
            raise StateError(f"Another pack is writing to {out}; let it end, or choose another folder.") from cause
        _agree(out, opened.read(), said)
        yield


def _agree(out: Path, text: str, said: dict[str, Any]) -> None:
    try:
        found = json.loads(text)
        before = {name: found[name] for name in said}
    except (ValueError, KeyError, TypeError) as cause:
        raise StateError(
            f"{out / PLAN_FILE} is damaged; remove {out} and pack again, or choose another folder."
        ) from cause
    for name, value in said.items():
        if before[name] != value:
            files = name == "fingerprint"
            what = "the files to pack have changed" if files else f"{name} was {before[name]!r} and is {value!r}"
            raise StateError(
                f"{out} was begun with something else: {what}; restore that to continue, or choose another folder."
            )


def _finished(out: Path) -> Index:
    index = Index.load(out / indices.FILE)
    for name, size in zip(index.shards, index.shard_sizes.tolist(), strict=True):
        if size_of(out / name) != size:
            raise StateError(f"{out} was packed, but {name} is gone or has changed; remove {out} and pack again.")
    return index


# ---------------------------------------------------------------- names


def _shard_name(number: int) -> str:
    return f"shard-{number:06}.tar"


def _checks(shard: Path) -> Path:
    """File with the checksums of a shard's samples, kept until the index is written."""
    return shard.with_suffix(".check")
