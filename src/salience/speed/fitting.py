"""Fitting activations into a budget of memory: measured on a few samples before the first step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from salience.speed.checkpointing import Unit, choose_segments, measure, scaled, smallest_segments, units_of

SAMPLES_MEASURED = 4
"""Samples of the first batch with which the memory for activations is measured."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fit:
    """The segments that run under checkpointing, and why."""

    units: Sequence[Unit] = ()
    segments: Sequence[tuple[int, ...]] = ()
    said: str = ""
    """What was found, in words; empty if nothing could be measured."""
    trouble: str = ""
    """A warning; empty if the budget is kept to."""


def fit(model: nn.Module, inputs: Sequence[Any], more: Mapping[str, Any], budget: int) -> Fit:
    """How the activations of a batch like this one fit into `budget` bytes. The model and its statistics stay as they are."""
    tensors = [one for one in (*inputs, *more.values()) if isinstance(one, Tensor) and one.dim()]
    size = len(tensors[0]) if tensors else 0
    model, few = inside(model), min(SAMPLES_MEASURED, size)
    if any(one._forward_hooks or one._forward_pre_hooks for one in model.modules()):  # pyright: ignore[reportPrivateUsage]
        return Fit(trouble="memory= is without effect: hooks on layers (loader.attach) would see their inputs twice.")
    units = units_of(model)
    if not units or not few:
        return Fit(trouble="memory= is without effect: the model has no Sequential or ModuleList to cut into segments.")

    def part(one: Any) -> Any:
        return one[:few] if isinstance(one, Tensor) and one.dim() and len(one) == size else one

    account = measure(model, units, [part(one) for one in inputs], {key: part(one) for key, one in more.items()})
    account = scaled(account, size / few)
    chosen = choose_segments(account, units, budget)
    fits = chosen is not None
    chosen = chosen or smallest_segments(account, units)
    said = f"activations of a batch take {_mib(account.whole)} of {_mib(budget)} allowed"
    if chosen.groups:
        share = chosen.seconds / max(1e-12, sum(account.seconds))
        said += f"; with {len(chosen.groups)} segments {_mib(chosen.kept)}, and {share:.0%} of the forward pass is made twice"
    trouble = "" if fits else f"memory={budget} is too little for a batch of {size}: {said}. Use smaller batches."
    return Fit(units=units, segments=chosen.groups, said=f"{said}; exact", trouble=trouble)


def inside(model: nn.Module) -> nn.Module:
    """The model inside DistributedDataParallel."""
    found = getattr(model, "module", None)
    wrapped = isinstance(model, nn.parallel.DistributedDataParallel) and isinstance(found, nn.Module)
    return found if wrapped and found is not None else model


def _mib(size: float) -> str:
    return f"{size / 2**20:,.1f} MiB"
