"""The opinions of other models on every sample, from ledgers, their files, or plain losses."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from salience import ledger as ledgers
from salience.errors import ConfigError, StateError
from salience.ledger import Ledger
from salience.select.ranks import ranks_of_known
from salience.select.view import Floats, Reference
from salience.stats import known_mean

Opinion = Ledger | str | Path | npt.ArrayLike
"""One network: its Ledger, the ledger's file or run folder, or its losses, float [n]."""


def reference_of(opinions: Opinion | Sequence[Opinion], n: int) -> Reference:
    """The opinion of one network on `n` samples, or the mean opinion of several."""
    several: Sequence[Any] = (opinions,)
    # A list of numbers is the losses of one network, a list of anything else that many networks.
    if isinstance(opinions, (list, tuple)) and any(isinstance(o, (Ledger, str, Path)) or np.ndim(o) for o in opinions):
        several = opinions
    each = [_opinion(opinion, n) for opinion in several]
    losses, hardness = [loss for loss, _ in each], [ranks_of_known(hardness) for _, hardness in each]
    reference = Reference(
        loss=known_mean(np.stack(losses)).astype(np.float32), hardness=known_mean(np.stack(hardness)).astype(np.float32)
    )
    if np.isnan(reference.loss).all():
        raise ConfigError(
            "The reference knows the loss of no sample; give one that was trained or measured on this data."
        )
    for array in (reference.loss, reference.hardness):
        array.setflags(write=False)
    return reference


def checksum(reference: Reference | None) -> int | None:
    """A number that distinguishes references."""
    return None if reference is None else zlib.crc32(reference.hardness.tobytes(), zlib.crc32(reference.loss.tobytes()))


def inconsistency(ledger: Ledger) -> Floats:
    """1 - C, C = (times right + mean p(label)) / (visits + 1): how rarely a sample was right while the network learnt.

    Cumulative accuracy is the free proxy of the C-score (Jiang et al. 2021); p(label) counts as one more, fractional visit
    and breaks its many ties. The mean loss if the ledger has no guesses. float32 [n]; NaN where unknown.
    """
    known = ledger.guess >= 0
    if not known.any():
        return ledger.mean_loss.copy()
    right = (ledger.right + ledger.confidence.astype(np.float32)) / (ledger.seen.astype(np.float32) + 1)
    return np.where(known, 1 - right, np.float32(np.nan)).astype(np.float32)


def _opinion(opinion: Any, n: int) -> tuple[Floats, Floats]:
    """Loss and hardness in the units of one network, float32 [n] each."""
    if isinstance(opinion, (str, Path)):
        opinion = ledgers.load(ledger_file(opinion))
    if isinstance(opinion, Ledger):
        loss, hardness = opinion.mean_loss.copy(), inconsistency(opinion)
    else:
        given = np.asarray(opinion)
        if given.dtype.kind not in "fiu" or given.ndim != 1:
            raise ConfigError(
                f"reference is {given.dtype} of shape {given.shape}; it must be one loss per sample, [{n}]."
            )
        loss = given.astype(np.float32)
        loss[~np.isfinite(loss)] = np.nan
        hardness = loss
    if len(loss) != n:
        raise ConfigError(f"The reference has {len(loss)} samples, the data set {n}; they must be the same, in order.")
    return loss, hardness


def ledger_file(path: str | Path) -> Path:
    """Path of the ledger at `path`: the file itself, or the one in a run's folder."""
    path = Path(path)
    if not path.is_dir():
        return path
    if not (path / "ledger.npz").exists():
        raise StateError(
            f"The folder {str(path)!r} holds no ledger.npz; a run writes it at its end. Name a ledger file."
        )
    return path / "ledger.npz"


def opinions_of(paths: Sequence[str], n: int) -> list[Ledger]:
    """The ledgers of other runs over the same `n` samples, by file or run folder."""
    found = [ledgers.load(ledger_file(path)) for path in paths]
    for path, ledger in zip(paths, found, strict=True):
        if ledger.n != n:
            raise ConfigError(
                f"select.ledgers: {path!r} has {ledger.n} samples, the data set {n}; they must be the same, in order."
            )
    return found
