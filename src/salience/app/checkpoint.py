"""The files of a training run in its folder: checkpoints that are whole or absent, and its ledger.

    out/last.pt        the newest checkpoint
    out/previous.pt    the one before, in case the disk has damaged the newest
    out/rank-1.pt      with --sync: what only rank 1 knows, such as gradients not sent yet; likewise for every rank except 0
    out/ledger.npz     what is known of every sample, written at the end
    out/names.npz      the file of every sample, likewise
    out/copies.npz     near-copies, if they were searched for
    out/run.jsonl      the event log
    out/scorer/        questions to a scorer elsewhere and its answers, with --remote-scores
    out/lock           id of the process that writes here now; removed when it ends

Checkpoints are read with `weights_only=True`, so loading one from a stranger does not run their code.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch

from salience.config import TrainConfig
from salience.errors import StateError
from salience.files import atomic, read_npz, write_npz

LAST, PREVIOUS, PART, DAMAGED = "last.pt", "previous.pt", "last.pt.part", "last.pt.damaged"
LEDGER, LOG, NAMES, COPIES, LOCK = "ledger.npz", "run.jsonl", "names.npz", "copies.npz", "lock"
SCORER = "scorer"
HISTORY = "history.npz"
FORMAT, NAMES_FORMAT = "salience-checkpoint-1", "salience-names-1"
FIXED_SETTINGS = ("model", "epochs", "batch_size", "lr", "weight_decay", "size", "seed")
"""Settings that cannot change during a run; the loader takes care of `select`."""


def exists(folder: Path) -> bool:
    """True if a run has left a checkpoint here, whole or not."""
    return any((folder / name).exists() for name in (LAST, PREVIOUS))


@contextlib.contextmanager
def claimed(folder: Path) -> Generator[None]:
    """Create the folder and lock it for this process; raises StateError if another process writes there.

    The lock ends with the process, whatever the reason; loader workers do not inherit it.
    """
    path, there = folder / LOCK, folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as cause:
        raise StateError(
            f"The folder {str(folder)!r} cannot be made or written to: {cause.strerror or cause}; choose another --out."
        ) from cause
    try:
        try:
            fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as cause:
            if cause.errno in (errno.EACCES, errno.EAGAIN):
                owner = os.read(handle, 32).decode("ascii", "replace").strip() or "not known"
                raise StateError(
                    f"Another run (process {owner}) is writing to {str(folder)!r}; let it end, or choose another --out."
                ) from cause  # a file system without locks is no reason to stop
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"{os.getpid()}\n".encode(), 0)
        try:
            yield
        finally:
            with contextlib.suppress(OSError):  # what went wrong in the run is more important than its lock
                path.unlink()
            if not there:
                with contextlib.suppress(OSError):  # it is not empty: the run has left something in it
                    folder.rmdir()
    finally:
        os.close(handle)


def write(folder: Path, state: Mapping[str, Any]) -> None:
    """Make `state` the newest checkpoint. A kill at any moment leaves a whole one: the new one or the previous one."""
    try:
        # One fixed name until it is whole, so that what a killed run left is overwritten by the next.
        with atomic(folder / LAST, part=folder / PART, previous=folder / PREVIOUS) as file:
            torch.save({"format": FORMAT, **state}, file)
    except (OSError, RuntimeError) as cause:
        reason = _disk_error(cause) or str(cause).partition("\n")[0]
        raise StateError(
            f"No checkpoint could be written to {str(folder)!r}: {reason}. The previous one is intact; free some space "
            "there and continue with --resume."
        ) from cause


def write_of_rank(folder: Path, rank: int, state: Mapping[str, Any]) -> None:
    """Save what only one rank knows, before the checkpoint it belongs to is written; the previous one is kept."""
    path = folder / f"rank-{rank}.pt"
    with atomic(path, part=path.with_suffix(".pt.part"), previous=path.with_suffix(".previous.pt")) as file:
        torch.save({"format": FORMAT, **state}, file)


def read_of_rank(folder: Path, rank: int, stamp: Sequence[int]) -> dict[str, Any] | None:
    """What that rank saved with the checkpoint that has this stamp; None if it is lost."""
    for name in (f"rank-{rank}.pt", f"rank-{rank}.previous.pt"):
        with contextlib.suppress(StateError):
            if (folder / name).exists() and (state := read(folder / name))["stamp"] == list(stamp):
                return state
    return None


def launch() -> str:
    """The unique id of this torchrun job, which stays the same when ranks are restarted; empty if there is none."""
    given = os.environ.get("TORCHELASTIC_RUN_ID", "")
    return "" if given == "none" else given


def restarted(folder: Path) -> bool:
    """True if torchrun has restarted its ranks, and the checkpoint here was written by the previous ones."""
    for path in (folder / LAST, folder / PREVIOUS) if launch() else ():
        with contextlib.suppress(StateError):
            if path.exists():
                return read(path).get("launch") == launch()
    return False


def _disk_error(error: BaseException | None) -> str:
    """The system's error, which torch.save hides behind one from its own clean-up."""
    while error is not None:
        if isinstance(error, OSError) and error.strerror:
            return error.strerror
        error = error.__cause__ or error.__context__
    return ""


def newest(folder: Path, warn: Callable[[str], None]) -> dict[str, Any]:
    """The newest checkpoint that is whole. A damaged one is passed to `warn` and kept under another name."""
    damage = ""
    for name in (LAST, PREVIOUS):
        path = folder / name
        if not path.exists():
            continue
        try:
            state = read(path)
        except StateError as cause:
            damage = damage or str(cause)
            continue
        if damage:  # out of the way: the next checkpoint makes last.pt the previous one, which must be whole
            os.replace(folder / LAST, folder / DAMAGED)
            warn(f"{damage} It is kept as {DAMAGED}; continuing from {name}, the previous checkpoint.")
        return state
    if damage:
        raise StateError(f"{damage} There is no other in {str(folder)!r}; start a new run with another --out.")
    raise StateError(
        f"There is no checkpoint in {str(folder)!r} to resume from; start without --resume, or check --out."
    )


def read(path: Path) -> dict[str, Any]:
    """Read one checkpoint file, never running code from it."""
    try:
        state: Any = torch.load(path, map_location="cpu", weights_only=True)
    except PermissionError as cause:
        raise StateError(f"The checkpoint {str(path)!r} cannot be read: {cause.strerror}.") from cause
    except Exception as cause:  # a loader fed with half a file may raise anything
        raise StateError(f"The checkpoint {str(path)!r} is damaged or half-written.") from cause
    if not isinstance(state, dict) or "format" not in state:
        raise StateError(f"{str(path)!r} is not a checkpoint of salience train.")
    if state["format"] != FORMAT:
        raise StateError(f"{str(path)!r} has format {state['format']!r}; this salience reads {FORMAT!r}.")
    return cast("dict[str, Any]", state)


def check_fits(saved: Mapping[str, Any], config: TrainConfig, classes: Sequence[str], names: int) -> None:
    """Raise StateError if the checkpoint belongs to other data or settings."""
    if saved["classes"] != list(classes):
        raise StateError(
            f"The checkpoint in {config.out!r} has other data: classes {_few(saved['classes'])} there, "
            f"{_few(classes)} here; resume with the same --data, or choose another --out."
        )
    if saved["names"] != names:
        raise StateError(
            f"The checkpoint in {config.out!r} was made from other images: the list of names differs from that of "
            f"{config.data!r}; resume with the very same data, or choose another --out."
        )
    for name in FIXED_SETTINGS:
        was, now = saved["config"][name], getattr(config, name)
        if was != now:
            raise StateError(
                f"The checkpoint in {config.out!r} was made with {name} {was!r}, now it is {now!r}; resume with the same, "
                "or choose another --out."
            )


def _few(names: Sequence[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:4])
    return shown if len(names) <= 4 else f"{shown}, ... ({len(names)})"


def ledger_file(path: str | Path) -> Path:
    """Path of the ledger at `path`: the file itself, or the one in a run's folder."""
    path = Path(path)
    if not path.is_dir():
        return path
    if not (path / LEDGER).exists():
        raise StateError(
            f"The folder {str(path)!r} holds no {LEDGER}; a run writes it at its end. Finish it with "
            "`salience train --resume`, or name a ledger file."
        )
    return path / LEDGER


def write_names(
    folder: Path, names: npt.NDArray[np.uint8], offsets: npt.NDArray[np.int64], ids: npt.NDArray[np.int64]
) -> None:
    """Save the file names of a listing, and the position of each sample in it."""
    write_npz(folder / NAMES, {"format": np.array(NAMES_FORMAT), "names": names, "offsets": offsets, "ids": ids})


def read_names(folder: Path, n: int) -> Callable[[int], str] | None:
    """A function from the id of one of `n` samples to the name of its file, for display; None if the run saved none."""
    if not (folder / NAMES).exists():
        return None
    kept = read_npz(folder / NAMES, NAMES_FORMAT, "list of file names")
    names, offsets, ids = kept["names"], kept["offsets"], kept["ids"]
    if len(ids) != n:
        raise StateError(f"{str(folder / NAMES)!r} names {len(ids)} samples, not {n}; it is of another run, delete it.")

    def name(sample: int) -> str:
        i = int(ids[sample])
        return names[offsets[i] : offsets[i + 1]].tobytes().decode(errors="backslashreplace")

    return name
