"""A profile: what holds a loop back, what each lever could gain, how busy the machine was; one event says it all."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict

import torch

from salience.events import BottleneckFound, LeverCeiling, MachineUse, StepCosts
from salience.watch.model import MIN_SPEEDUP_TO_TRY, Costs, ceiling, find_bottleneck, levers
from salience.watch.usage import UsageSample

IDLE_GPU_SHARE = 0.5
"""A GPU that is busy for less than this share of the time does not hold a loop back."""


def profiled(
    costs: Costs, *, cores: int, losses: bool, usage: Sequence[UsageSample] = (), missing: Sequence[str] = ()
) -> BottleneckFound:
    """The verdict on measured costs; `losses` = the loop called `loss()`, `missing` = packages that are not installed."""
    found = [ceiling(costs, lever) for lever in levers(costs, cores=cores)]
    found.sort(key=lambda c: (not c.lever.exact, -c.speedup))
    said = find_bottleneck(costs, found)
    notes: list[str] = []
    if not losses:
        notes.append("The script never calls loader.loss(), so forward and backward cannot be told apart.")
    busy = [max(sample.gpu) for sample in usage[len(usage) // 2 :] if sample.gpu]
    if said.kind == "compute" and busy and sum(busy) / len(busy) < IDLE_GPU_SHARE:
        notes.append(
            f"The GPU itself was busy only {sum(busy) / len(busy):.0%} of the time (NVML): Python and kernel launches hold the "
            "loop back. Larger batches, torch.compile or CUDA graphs would help more than any lever here."
        )
    if not torch.cuda.is_available():
        notes.append("No GPU was found: the accelerator is this machine's processor.")
    elif "pynvml" in missing:
        notes.append("nvidia-ml-py is not installed (pip install 'salience[watch]'): GPU utilisation is not shown.")
    if "psutil" in missing:
        notes.append(
            "psutil is not installed (pip install 'salience[watch]'): utilisation of the machine is not shown."
        )
    return BottleneckFound(
        text=said.text,
        bound=said.kind,
        cause=said.cause,
        share=said.share,
        costs=StepCosts(**asdict(costs)),
        levers=tuple(
            LeverCeiling(
                name=one.lever.name, exact=one.lever.exact, worth=one.speedup >= MIN_SPEEDUP_TO_TRY,
                speedup=_finite(one.speedup), low=_finite(one.low), high=_finite(one.high),
            )
            for one in found
        ),
        usage=tuple(MachineUse(**asdict(sample)) for sample in usage),
        notes=tuple(notes),
    )  # fmt: skip


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
