"""Which images there are, of which class: walked once and remembered, so that a million files start in seconds.

    data/<class>/**/*.jpg                            classes right below,
    data/train/<class>/**, data/test/<class>/**      or below splits,
    data/wrapper/...                                 or either of them inside one lone folder, as in many archives

A tar is read where it lies, by byte offset. Nothing is ever unpacked by name, so no member can write outside.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import logging
import os
import stat
import tarfile
import tempfile
import time
import zipfile
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np
import numpy.typing as npt

from salience.errors import ConfigError, DataError, did_you_mean

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".gif", ".ppm")
TEST_NAMES = ("test", "val", "valid", "validation")

Progress = Callable[[int, int], None]

_FORMAT = 1  # of the cache file; raise it when its fields change
_SETTLED_NS = 2_000_000_000  # a folder changed more recently may change again within one tick of its clock
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Listing:
    """N images of one split. Names are two arrays, not N objects, so that forked workers share them uncopied."""

    root: Path
    """The folder that names are relative to, or the (unpacked) tar file."""
    kind: Literal["folder", "tar"]
    names: npt.NDArray[np.uint8]
    """uint8, all names joined, in the file system's encoding."""
    name_offsets: npt.NDArray[np.int64]
    """int64 [N + 1], name i is names[name_offsets[i] : name_offsets[i + 1]]."""
    labels: npt.NDArray[np.int32]
    """int32 [N], index into `classes`."""
    classes: tuple[str, ...]
    """Sorted names of the class directories of all splits, so that labels mean the same in each."""
    sizes: npt.NDArray[np.int64]
    """int64 [N], bytes of each file; 0 in a folder, where asking would cost a system call a file."""
    data_offsets: npt.NDArray[np.int64]
    """int64 [N], where each image's bytes start in the tar; 0 in a folder."""

    def __len__(self) -> int:
        return len(self.labels)

    def name(self, i: int) -> str:
        """Path of image i below the root, with forward slashes."""
        if not 0 <= i < len(self):
            raise IndexError(f"image {i} of {len(self)}")
        return os.fsdecode(self.names[self.name_offsets[i] : self.name_offsets[i + 1]].tobytes())


def list_images(
    path: str | os.PathLike[str],
    *,
    split: str | None = None,
    cache_dir: Path | None = None,
    progress: Progress | None = None,
) -> Listing:
    """List the images of a folder, tar or tar.gz; ordered by class, then name.

    `split` is "train" or "test" ("test" also finds val, valid or validation; each can be named itself), and
    None where there are no splits. `progress(done, total)` counts class folders, or bytes of an archive.
    """
    where, cache = _existing(path), _cache_dir(cache_dir)
    tar = _plain_tar(where, cache, progress) if where.is_file() else None
    found = _load(cache, tar or where, split)
    if found is None:
        found = _from_tar(tar, where, split, cache, progress) if tar else _from_folder(where, split, cache, progress)
    if not len(found):
        raise DataError(f"{where} holds no images{_in(split)}; images end in {', '.join(SUFFIXES)}")
    return found


def splits(path: str | os.PathLike[str], *, cache_dir: Path | None = None) -> tuple[str, ...]:
    """What `list_images` takes as split: ("train", "test"), or () where classes lie right below the root."""
    where, cache = _existing(path), _cache_dir(cache_dir)
    if where.is_dir():
        return ("train", "test") if _has_splits(_enter(where, [])[1]) else ()
    tar = _plain_tar(where, cache, None)
    if _load(cache, tar, "train") is not None:
        return ("train", "test")
    if _load(cache, tar, None) is not None:
        return ()
    source = _source(tar)
    members = _members(tar, where, None)
    has = _has_splits(_top(members)[0])
    for split in ("train", "test") if has else (None,):  # the scan is the dear part: keep what it found
        with contextlib.suppress(DataError):  # list_images is the place to complain of what is in a split
            _save(cache, tar, split, _assemble_tar(tar, where, split, members), [source])
    return ("train", "test") if has else ()


# ---------------------------------------------------------------- splits and wrappers


def _has_splits(directories: Iterable[str]) -> bool:
    names = set(directories)
    return "train" in names and not names.isdisjoint(TEST_NAMES)


def _split_folders(where: Path, split: str | None, directories: Sequence[str]) -> tuple[str, list[str]]:
    """The directory `split` means ("" for none), and all directories whose classes count."""
    if not _has_splits(directories):
        if split is not None:
            raise ConfigError(f"{where} has no splits (train and test folders), so {split=} selects nothing; use None")
        return "", [""]
    there = [name for name in ("train", *TEST_NAMES) if name in directories]
    if split is None:
        raise ConfigError(f"{where} has the splits {', '.join(there)}; say which one: split='train' or split='test'")
    if split in there:
        return split, there
    if split == "test":
        return there[1], there
    raise ConfigError(f"{where} has no split {split!r}.{did_you_mean(split, [*there, 'test'])}")


def _in(split: str | None) -> str:
    return f" in its split {split!r}" if split else ""


def _no_classes(where: Path, split: str | None) -> DataError:
    return DataError(
        f"{where} has images{_in(split)} but no class folders; put the images of each class into a folder named"
        " after it"
    )


def _is_image(name: str) -> bool:
    return name.lower().endswith(SUFFIXES) and not name.startswith(".")


# ---------------------------------------------------------------- folders


@dataclass(frozen=True, kw_only=True, slots=True)
class _Source:
    """A folder or archive as it was just before it was read."""

    path: str
    stamp: tuple[int, int]
    settled: bool


def _stamp(path: str | Path) -> tuple[int, int]:
    """What changes when a folder or archive does: the size (of a file alone) and the time."""
    status = os.stat(path)
    return (0 if stat.S_ISDIR(status.st_mode) else status.st_size), status.st_mtime_ns


def _source(path: Path) -> _Source:
    stamp = _stamp(path)
    return _Source(path=str(path), stamp=stamp, settled=abs(time.time_ns() - stamp[1]) > _SETTLED_NS)


def _scan(directory: Path, read: list[_Source]) -> tuple[list[str], list[str]]:
    """Names of the directories and images right below, hidden ones left out. Notes itself in `read`."""
    directories: list[str] = []
    images: list[str] = []
    try:
        read.append(_source(directory))
        with os.scandir(directory) as entries:
            for entry in entries:
                if _is_image(entry.name) and not entry.is_dir():
                    images.append(entry.name)
                elif not entry.name.startswith(".") and entry.is_dir():
                    directories.append(entry.name)
    except OSError as error:
        raise DataError(
            f"folder {directory} cannot be listed: {error.strerror or error}; check its permissions"
        ) from error
    return sorted(directories), images


def _enter(where: Path, read: list[_Source]) -> tuple[Path, list[str], list[str]]:
    """Step through a wrapper folder: the folder that has the splits or classes, its folders, its images."""
    directories, images = _scan(where, read)
    if len(directories) == 1 and not images:
        inner = where / directories[0]
        inner_directories, inner_images = _scan(inner, read)
        # A lone folder of folders is a wrapper; a lone folder of images is the only class.
        if inner_directories and not inner_images:
            return inner, inner_directories, []
    return where, directories, images


def _from_folder(where: Path, split: str | None, cache: Path, progress: Progress | None) -> Listing:
    read: list[_Source] = []
    root, directories, strays = _enter(where, read)
    folder, counted = _split_folders(where, split, directories)
    if folder:
        contents = {name: _scan(root / name, read) for name in counted}
        own, strays = contents[folder]
        classes = sorted({name for names, _ in contents.values() for name in names})
    else:
        own = classes = directories
    if not own:
        if strays:
            raise _no_classes(where, split)
        raise DataError(f"{where} holds no class folders with images{_in(split)}")

    names: list[bytes] = []
    labels: list[npt.NDArray[np.int32]] = []
    prefix = f"{folder}/" if folder else ""
    numbers = {name: number for number, name in enumerate(classes)}
    for done, name in enumerate(own):
        found = _walk(root, prefix + name, read)
        names += sorted(os.fsencode(file) for file in found)
        labels.append(np.full(len(found), numbers[name], np.int32))
        if progress is not None:
            progress(done + 1, len(own))
    nothing = np.zeros(len(names), np.int64)
    listing = _listing(root, "folder", names, np.concatenate(labels), tuple(classes), nothing, nothing)
    _save(cache, where, split, listing, read)
    return listing


def _walk(root: Path, top: str, read: list[_Source]) -> list[str]:
    """All images below root/top, as names relative to root."""
    names: list[str] = []
    seen: set[tuple[int, int]] = set()  # links may form a circle
    todo = [top]
    while todo:
        here = todo.pop()
        status = os.stat(root / here)
        if (status.st_dev, status.st_ino) in seen:
            continue
        seen.add((status.st_dev, status.st_ino))
        directories, images = _scan(root / here, read)
        names += [f"{here}/{image}" for image in images]
        todo += [f"{here}/{directory}" for directory in directories]
    return names


# ---------------------------------------------------------------- tars


@dataclass(frozen=True, kw_only=True, slots=True)
class _Member:
    name: str
    offset: int
    size: int


def _members(tar: Path, shown: Path, progress: Progress | None) -> list[_Member]:
    """Every image in the tar, by its header alone."""
    total = tar.stat().st_size
    members: list[_Member] = []
    try:
        with tarfile.open(tar, "r:") as archive:
            for count, header in enumerate(archive):
                # Or tarfile keeps every header it has read; the stubs do not know the attribute.
                archive.members = []  # pyright: ignore[reportAttributeAccessIssue]
                name = header.name.removeprefix("./")
                parts = name.split("/")
                hidden = any(part.startswith(".") for part in parts)  # ".." among them
                if header.isreg() and not header.issparse() and _is_image(parts[-1]) and parts[0] and not hidden:
                    members.append(_Member(name=name, offset=header.offset_data, size=header.size))
                if progress is not None and count % 1000 == 0:
                    progress(header.offset_data, total)
            end: int = archive.offset
        with open(tar, "rb") as file:
            file.seek(end)
            # tarfile stops without a word at a damaged header; an intact archive ends in blocks of zeros.
            whole = file.read(tarfile.BLOCKSIZE) == bytes(tarfile.BLOCKSIZE)
    except (tarfile.TarError, OSError, EOFError) as error:
        if "unexpected end" in str(error):
            raise _truncated(shown) from error
        raise DataError(f"{shown} is not a tar archive ({error}); give a folder, a .tar or a .tar.gz") from error
    if not whole:
        raise _truncated(shown)
    if progress is not None:
        progress(total, total)
    return members


def _truncated(shown: Path) -> DataError:
    return DataError(f"{shown} is a truncated or damaged tar archive; download or pack it again")


def _top(members: Sequence[_Member]) -> tuple[list[str], int]:
    """The directories that are splits or classes, and their level: 1 below a wrapper, else 0."""
    paths = [member.name.split("/") for member in members]
    outer = {parts[0] for parts in paths if len(parts) > 1}
    if len(outer) == 1 and all(len(parts) > 2 for parts in paths):
        return sorted({parts[1] for parts in paths}), 1
    return sorted(outer), 0


def _from_tar(tar: Path, shown: Path, split: str | None, cache: Path, progress: Progress | None) -> Listing:
    source = _source(tar)
    listing = _assemble_tar(tar, shown, split, _members(tar, shown, progress))
    _save(cache, tar, split, listing, [source])
    return listing


def _assemble_tar(tar: Path, shown: Path, split: str | None, members: list[_Member]) -> Listing:
    directories, level = _top(members)
    folder, counted = _split_folders(shown, split, directories)
    at = level + 1 if folder else level  # where in its path a member's class stands

    def place(member: _Member) -> tuple[str, str]:
        parts = member.name.split("/")
        return (parts[level] if folder else ""), (parts[at] if len(parts) > at + 1 else "")

    kept = [(*place(member), member) for member in members]
    classes = sorted({label for of, label, _ in kept if label and of in counted})
    numbers = {name: number for number, name in enumerate(classes)}
    own = [(label, os.fsencode(member.name), member) for of, label, member in kept if of == folder]
    mine = sorted((item for item in own if item[0]), key=lambda item: item[:2])
    if own and not mine:
        raise _no_classes(shown, split)
    # Appending to a tar replaces a member by writing it anew: the last one counts. Sorting kept their order.
    mine = [list(same)[-1] for _, same in groupby(mine, key=lambda item: item[:2])]
    return _listing(
        tar,
        "tar",
        [name for _, name, _ in mine],
        np.array([numbers[label] for label, _, _ in mine], np.int32),
        tuple(classes),
        np.array([member.size for _, _, member in mine], np.int64),
        np.array([member.offset for _, _, member in mine], np.int64),
    )


def _plain_tar(where: Path, cache: Path, progress: Progress | None) -> Path:
    """The tar itself, or the plain twin of a compressed one in the cache, where members can be read singly."""
    try:
        with open(where, "rb") as file:
            if file.read(2) != b"\x1f\x8b":
                return where
    except OSError as error:
        raise DataError(f"{where} cannot be read: {error.strerror or error}; check its permissions") from error
    status = where.stat()
    of_path = _digest(str(where))
    plain = cache / f"{of_path}-{_digest(f'{status.st_size} {status.st_mtime_ns}')}.tar"
    if plain.exists():
        return plain

    def unpack(out: IO[bytes]) -> None:
        with open(where, "rb") as packed, gzip.open(packed) as stream:
            while block := stream.read(1 << 20):
                out.write(block)
                if progress is not None:
                    progress(packed.tell(), status.st_size)

    try:
        _replace(plain, unpack)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise _truncated(where) from error
    except OSError as error:
        raise DataError(
            f"{where} cannot be unpacked into {cache}: {error.strerror or error}; free some space there, or pass"
            " another cache_dir"
        ) from error
    for stale in cache.glob(f"{of_path}-*.tar"):  # of this archive as it was before it changed
        if stale != plain:
            stale.unlink(missing_ok=True)
    return plain


# ---------------------------------------------------------------- what is remembered


def _existing(path: str | os.PathLike[str]) -> Path:
    where = Path(path).expanduser().resolve()
    if not where.exists():
        raise DataError(f"there is no file or folder {where}; check the path")
    return where


def _cache_dir(given: Path | None) -> Path:
    if given is not None:
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "salience"


def _digest(text: str) -> str:
    return hashlib.sha256(os.fsencode(text)).hexdigest()[:24]


def _cache_file(cache: Path, where: Path, split: str | None) -> Path:
    return cache / f"{_digest(f'{where}//{split}')}.npz"


def _listing(
    root: Path,
    kind: Literal["folder", "tar"],
    names: Sequence[bytes],
    labels: npt.NDArray[np.int32],
    classes: tuple[str, ...],
    sizes: npt.NDArray[np.int64],
    offsets: npt.NDArray[np.int64],
) -> Listing:
    blob, ends = _pack(names)
    return Listing(
        root=root,
        kind=kind,
        names=blob,
        name_offsets=ends,
        labels=labels,
        classes=classes,
        sizes=sizes,
        data_offsets=offsets,
    )


def _pack(names: Sequence[bytes]) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    ends = np.zeros(len(names) + 1, np.int64)
    np.cumsum([len(name) for name in names], out=ends[1:])
    return np.frombuffer(b"".join(names), np.uint8), ends


def _unpack(blob: npt.NDArray[np.uint8], ends: npt.NDArray[np.int64]) -> list[str]:
    data, cuts = blob.tobytes(), ends.tolist()
    return [os.fsdecode(data[start:stop]) for start, stop in pairwise(cuts)]


def _save(cache: Path, where: Path, split: str | None, listing: Listing, sources: list[_Source]) -> None:
    """Remember the listing for as long as its sources stay as they are. Failing to is no reason to stop."""
    if listing.kind == "folder" and not all(source.settled for source in sources):
        return
    try:
        source_blob, source_ends = _pack([os.fsencode(source.path) for source in sources])
        class_blob, class_ends = _pack([os.fsencode(name) for name in listing.classes])
        root_blob, _ = _pack([os.fsencode(listing.root)])
        fields: dict[str, npt.NDArray[Any]] = {
            "format": np.array(_FORMAT),
            "source_blob": source_blob,
            "source_ends": source_ends,
            "stamps": np.array([source.stamp for source in sources], np.int64),
            "class_blob": class_blob,
            "class_ends": class_ends,
            "root": root_blob,
            "is_tar": np.array(listing.kind == "tar"),
            "names": listing.names,
            "name_offsets": listing.name_offsets,
            "labels": listing.labels,
            "sizes": listing.sizes,
            "offsets": listing.data_offsets,
        }
        _replace(_cache_file(cache, where, split), lambda file: np.savez(file, allow_pickle=False, **fields))
    except OSError as error:
        _log.warning("the listing of %s is not remembered in %s: %s", where, cache, error)


def _load(cache: Path, where: Path, split: str | None) -> Listing | None:
    """The remembered listing, or None: never made, out of date, or damaged."""
    try:
        with open(_cache_file(cache, where, split), "rb") as file, np.load(file, allow_pickle=False) as fields:
            if int(fields["format"]) != _FORMAT:
                return None
            sources = _unpack(fields["source_blob"], fields["source_ends"])
            if [_stamp(source) for source in sources] != [tuple(row) for row in fields["stamps"].tolist()]:
                return None
            return Listing(
                root=Path(os.fsdecode(fields["root"].tobytes())),
                kind="tar" if bool(fields["is_tar"]) else "folder",
                names=fields["names"],
                name_offsets=fields["name_offsets"],
                labels=fields["labels"],
                classes=tuple(_unpack(fields["class_blob"], fields["class_ends"])),
                sizes=fields["sizes"],
                data_offsets=fields["offsets"],
            )
    except (OSError, EOFError, ValueError, KeyError, TypeError, zipfile.BadZipFile, zlib.error):
        return None


def _replace(target: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Write a file as a whole or not at all: readers see the old one or the new one."""
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=".new-")
    try:
        with os.fdopen(handle, "wb") as file:
            write(file)
        os.replace(temporary, target)
    except BaseException:
        os.unlink(temporary)
        raise
