"""Which images there are, of which class: walked once and remembered, so that a million files start in seconds.

    data/<class>/**/*.jpg                            classes right below,
    data/train/<class>/**, data/test/<class>/**      or below splits,
    data/wrapper/...                                 or either of them inside one lone folder, as in many archives

A tar is read where it lies, by byte offset. Nothing is ever unpacked by name, so no member can write outside.
"""

from __future__ import annotations

import contextlib
import os
import tarfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import numpy as np
import numpy.typing as npt

from salience.app.remembered import (
    Listing,
    Progress,
    Source,
    cache_folder,
    load,
    make_listing,
    plain_tar,
    save,
    source_of,
    truncated,
)
from salience.errors import ConfigError, DataError, did_you_mean

__all__ = ["SUFFIXES", "TEST_NAMES", "Listing", "Progress", "list_images", "splits"]

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".gif", ".ppm")
TEST_NAMES = ("test", "val", "valid", "validation")


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
    where, cache = _existing(path), cache_folder(cache_dir)
    tar = plain_tar(where, cache, progress) if where.is_file() else None
    found = load(cache, tar or where, split)
    if found is None:
        found = _from_tar(tar, where, split, cache, progress) if tar else _from_folder(where, split, cache, progress)
    if not len(found):
        raise DataError(f"{where} holds no images{_in(split)}; images end in {', '.join(SUFFIXES)}")
    return found


def splits(
    path: str | os.PathLike[str], *, cache_dir: Path | None = None, progress: Progress | None = None
) -> tuple[str, ...]:
    """What `list_images` takes as split: ("train", "test"), or () where classes lie right below the root."""
    where, cache = _existing(path), cache_folder(cache_dir)
    if where.is_dir():
        return ("train", "test") if _has_splits(_enter(where, [])[1]) else ()
    tar = plain_tar(where, cache, progress)
    if load(cache, tar, "train") is not None:
        return ("train", "test")
    if load(cache, tar, None) is not None:
        return ()
    source = source_of(tar)
    members = _members(tar, where, progress)
    has = _has_splits(_top(members)[0])
    for split in ("train", "test") if has else (None,):  # the scan is the dear part: keep what it found
        with contextlib.suppress(DataError):  # list_images is the place to complain of what is in a split
            save(cache, tar, split, _assemble_tar(tar, where, split, members), [source])
    return ("train", "test") if has else ()


# ---------------------------------------------------------------- splits and wrappers


def _existing(path: str | os.PathLike[str]) -> Path:
    where = Path(path).expanduser().resolve()
    if not where.exists():
        raise DataError(f"there is no file or folder {where}; check the path")
    return where


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


def _scan(directory: Path, read: list[Source]) -> tuple[list[str], list[str]]:
    """Names of the directories and images right below, hidden ones left out. Notes itself in `read`."""
    directories: list[str] = []
    images: list[str] = []
    try:
        read.append(source_of(directory))
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


def _enter(where: Path, read: list[Source]) -> tuple[Path, list[str], list[str]]:
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
    read: list[Source] = []
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
        raise DataError(
            f"{where} holds no class folders with images{_in(split)}; make a folder for each class, its images inside"
        )

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
    listing = make_listing(root, "folder", names, np.concatenate(labels), tuple(classes), nothing, nothing)
    save(cache, where, split, listing, read)
    return listing


def _walk(root: Path, top: str, read: list[Source]) -> list[str]:
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
            raise truncated(shown) from error
        raise DataError(f"{shown} is not a tar archive ({error}); give a folder, a .tar or a .tar.gz") from error
    if not whole:
        raise truncated(shown)
    if progress is not None:
        progress(total, total)
    return members


def _top(members: Sequence[_Member]) -> tuple[list[str], int]:
    """The directories that are splits or classes, and their level: 1 below a wrapper, else 0."""
    paths = [member.name.split("/") for member in members]
    outer = {parts[0] for parts in paths if len(parts) > 1}
    if len(outer) == 1 and all(len(parts) > 2 for parts in paths):
        return sorted({parts[1] for parts in paths}), 1
    return sorted(outer), 0


def _from_tar(tar: Path, shown: Path, split: str | None, cache: Path, progress: Progress | None) -> Listing:
    source = source_of(tar)
    listing = _assemble_tar(tar, shown, split, _members(tar, shown, progress))
    save(cache, tar, split, listing, [source])
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
    return make_listing(
        tar,
        "tar",
        [name for _, name, _ in mine],
        np.array([numbers[label] for label, _, _ in mine], np.int32),
        tuple(classes),
        np.array([member.size for _, _, member in mine], np.int64),
        np.array([member.offset for _, _, member in mine], np.int64),
    )
