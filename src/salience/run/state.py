"""Saving a run and resuming it: what its state holds, what must be equal for it to fit, and how arrays are stored in it."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from salience.errors import StateError
from salience.ledger import COLUMNS
from salience.ledger.keys import Keys
from salience.plan import Shard
from salience.run.agreeing import check_equal
from salience.select.reference import checksum

if TYPE_CHECKING:
    from salience.run.run import Run

STATE_VERSION = 4
LACKING = {
    "treating": "The state was saved with stages and this Loader has none; resume with the same augment=.",
    "deciding": "The state was saved with auto, whose settings this Loader lacks; resume with the same auto=.",
}
"""The error if the state has a part that this run does not have, by name of the part."""


def saved(run: Run) -> dict[str, Any]:
    """Everything needed to continue as if the run had never stopped. With several ranks, every rank must call it."""
    if run.course.complete:
        run.close()
    run.flush()
    course = run.course
    return {
        "version": STATE_VERSION,
        **_identity(run),
        "world": run.setup.world,
        "batch_size": run.setup.batch_size,
        "global_batch": run.setup.global_batch,
        "evaluations": [list(result) for result in run.evaluations],
        "course": course.state_dict(),
        "plan": None if not course.open or course.shard is None else tensors(course.shard.arrays()),
        "delivered": _delivered_by_rank(run),
        "parts": {part.name: part.state_dict() for part in run.all_parts},
    }


def resume(run: Run, state: Mapping[str, Any]) -> None:
    """Continue where `state` was saved: the next iteration delivers the rest of that window."""
    if state.get("version") != STATE_VERSION:
        raise StateError(
            f"This state has version {state.get('version')!r} and this salience reads version {STATE_VERSION}: go on with "
            "the salience that saved it, or start anew with ledger= the ledger of that run."
        )
    _check_fits(run, state)
    parts, mine = state["parts"], {part.name: part for part in run.all_parts}
    for name, complaint in LACKING.items():
        if name in parts and name not in mine:
            raise StateError(complaint)
    if run.staging is not None and run.staging.name not in parts:
        run.staging.treating.load_state_dict(None)  # says which stages were expected
    if state["world"] != run.setup.world:
        _keep_batches(run, state)
    if run.streaming is not None:
        run.recording.ledger.extend(len(parts["recording"]["ledger"]["seen"]))
        run.setup.grow(run.recording.ledger.n)
    for name, part in mine.items():
        if name in parts:
            part.load_state_dict(parts[name])
    run.sensing.resume_features(run.copying.embeddings)
    run.evaluations = [(float(progress), float(metric)) for progress, metric in state["evaluations"]]
    run.course.load_state_dict(state["course"])
    if state["plan"] is not None:
        saved, (rank, world) = Shard.from_arrays(arrays(state["plan"])), (run.setup.rank, run.setup.world)
        delivered = state["course"]["delivered"] if state["delivered"] is None else state["delivered"][rank]
        shard = saved.of(rank) if saved.world == world else saved.among(rank, world, set(delivered))
        if run.setup.ranks is not None:
            check_equal(shard, run.setup.ranks)
        run.course.resume(shard, delivered)
    if run.streaming is not None:
        run.streaming.resume(open_window=run.course.open)
    run.choose_parts()
    run.resumes += 1


def _check_fits(run: Run, state: Mapping[str, Any]) -> None:
    """Raise StateError unless this run can go on with `state`."""
    advice = {
        "population": "resume with the data set it was made from",
        "reference": "resume with the same reference= (these are checksums)",
        "embeddings": "resume with the same embeddings= (these are checksums)",
        "window": "resume with the same window=",
        "quality": "resume with the same quality= (these are checksums)",
        "keys": "resume with the same data set and keys= (these are checksums), or start anew with ledger=",
    }
    for key, mine in _identity(run).items():
        if state.get(key) != mine:
            said = advice.get(key, f"resume with the same {key}")
            raise StateError(f"The state was saved with {key} {state.get(key)!r}, this run has {mine!r}; {said}.")
    setup = run.setup
    if state["batch_size"] != setup.batch_size and state["global_batch"] != setup.batch_size * setup.world:
        raise StateError(
            f"The state was saved with batch_size {state['batch_size']}, this run has {setup.batch_size} on {setup.world} "
            f"ranks; resume with the same, or with one that makes steps of {state['global_batch']} samples over all ranks."
        )
    if state["delivered"] is not None and state["world"] != setup.world:
        raise StateError(
            f"The ranks had different batches behind them when the state was saved (in_order=False does that), so it can "
            f"only be resumed with as many ranks, {state['world']}; this run has {setup.world}."
        )


def _keep_batches(run: Run, state: Mapping[str, Any]) -> None:
    """Keep the size of the steps of a run that had another number of ranks, and divide them among the ranks there are now."""
    setup, batch = run.setup, int(state["global_batch"])
    if run.by_length is not None:
        run.voice.warn(
            f"The run was saved on {state['world']} ranks and goes on with {setup.world}: steps of the window in progress keep "
            f"their samples, and later ones hold {setup.world} times {run.by_length.most:,} tokens."
        )
        return
    if batch < setup.world:
        raise StateError(
            f"The state was saved with {batch} samples per step, which cannot be divided among {setup.world} ranks; resume "
            f"with at most {batch}."
        )
    changes = setup.rank_batch != -(-batch // setup.world)
    setup.keep_batches_of(batch)
    if changes and run.feeding is not None:
        run.feeding.resize()
    run.voice.warn(
        f"The run was saved on {state['world']} ranks and goes on with {setup.world}: a step keeps its {batch} samples, so "
        f"that a rank now takes {setup.rank_batch} of them."
    )


def _delivered_by_rank(run: Run) -> list[list[int]] | None:
    """Batches delivered on each rank; None if all ranks have delivered the same ones, as they do unless in_order=False."""
    ranks, delivered = run.setup.ranks, sorted(run.course.delivered)
    if ranks is None:
        return None
    digest = zlib.crc32(np.array(delivered, dtype=np.int64).tobytes())
    if len({part for (part,) in ranks.gather_objects([digest])}) == 1:
        return None
    return ranks.gather_objects(delivered)


def _identity(run: Run) -> dict[str, Any]:
    """What must be the same for a state to fit."""
    setup = run.setup
    return {
        "population": None if setup.stream else setup.n, "seed": setup.seed,
        "window": setup.window if setup.pieces > 1 else None, "grow": run.planning.grow and run.planning.grow.described,
        "select": run.planning.described, "reference": checksum(run.sensing.given),
        "embeddings": None if run.copying.search is None else run.copying.search.given,
        "batch_tokens": None if run.by_length is None else run.by_length.most,
        "quality": _quality(run),
        "keys": None if setup.stream else _digest(run.recording.ledger.keys),
    }  # fmt: skip


def _quality(run: Run) -> int | None:
    pipeline = run.planning.pipeline
    return None if pipeline is None or pipeline.quality is None else zlib.crc32(pipeline.quality.tobytes())


def _digest(keys: Keys | None) -> int | None:
    return None if keys is None else zlib.crc32(keys.array().tobytes())


def tensors(of: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
    """Copies as tensors; unsigned integers travel under a signed type."""
    return {
        name: torch.from_numpy(np.array(a.view(f"i{a.itemsize}") if a.dtype.kind == "u" and a.itemsize > 1 else a))
        for name, a in of.items()
    }


def arrays(of: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
    """The arrays behind such tensors, ledger columns with their own type."""
    found: dict[str, np.ndarray] = {name: tensor.numpy() for name, tensor in of.items()}
    for name, array in found.items():
        dtype = np.dtype(COLUMNS[name].dtype) if name in COLUMNS else array.dtype
        if dtype != array.dtype:
            found[name] = array.view(dtype)
    return found
