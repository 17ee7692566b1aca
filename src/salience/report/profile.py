"""A profile for people: the sentence first, then where a step's time goes, what levers could gain, how busy the machine was."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from salience.watch.model import WORTH, Ceiling, Costs, Verdict, ceiling, levers, verdict
from salience.watch.usage import Sample, sparkline

IDLE = 0.5
"""A GPU that is busy for less than this share of the time does not hold a loop back."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """Everything `salience profile` found."""

    verdict: Verdict
    costs: Costs
    ceilings: tuple[Ceiling, ...]
    usage: tuple[Sample, ...]
    notes: tuple[str, ...]

    @classmethod
    def of(
        cls, costs: Costs, *, cores: int, losses: bool, usage: Sequence[Sample] = (), missing: Sequence[str] = ()
    ) -> Profile:
        found = [ceiling(costs, lever) for lever in levers(costs, cores=cores)]
        found.sort(key=lambda c: (not c.lever.exact, -c.speedup))
        notes: list[str] = []
        if not losses:
            notes.append("The script never calls loader.loss(), so forward and backward cannot be told apart.")
        found_verdict = verdict(costs, found)
        busy = [max(sample.gpu) for sample in usage[len(usage) // 2 :] if sample.gpu]
        if found_verdict.kind == "compute" and busy and sum(busy) / len(busy) < IDLE:
            notes.append(
                f"The GPU itself was busy only {sum(busy) / len(busy):.0%} of the time (NVML): what holds the loop back is "
                "Python and the launching of kernels. Larger batches, torch.compile or CUDA graphs would help more than any "
                "lever here."
            )
        if not torch.cuda.is_available():
            notes.append("No GPU was found: the accelerator is this machine's processor.")
        elif "pynvml" in missing:
            notes.append(
                "nvidia-ml-py is not installed (pip install 'salience[watch]'): the GPU's utilisation is not shown."
            )
        if "psutil" in missing:
            notes.append(
                "psutil is not installed (pip install 'salience[watch]'): utilisation of the machine is not shown."
            )
        return cls(verdict=found_verdict, costs=costs, ceilings=tuple(found), usage=tuple(usage), notes=tuple(notes))


def rendered(profile: Profile) -> str:
    costs = profile.costs
    lines = [profile.verdict.text, ""]
    alone = f"the loader alone {_ms(costs.input)}, the loop alone {_ms(costs.compute)}"
    lines.append(f"One step takes {_ms(costs.step)} (mean of {costs.steps}); {alone}.")
    lines += ["", f"  {'stage':<24}{'a step':>10}{'share':>8}"]
    total = sum(costs.work.values())
    for name, seconds in sorted(costs.work.items(), key=lambda item: -item[1]):
        where = f"{name} (workers)" if costs.workers else f"{name} (in the loop)"
        lines.append(f"  {where:<24}{_ms(seconds):>10}{seconds / total if total else 0:>8.0%}")
    rows = [
        ("wait", costs.wait),
        ("copy", costs.copy),
        ("forward", costs.forward),
        ("backward + optimizer", costs.backward),
    ]
    for name, seconds in rows if costs.copy else [rows[0], *rows[2:]]:
        lines.append(f"  {name:<24}{_ms(seconds):>10}{seconds / costs.step if costs.step else 0:>8.0%}")
    lines += ["", f"  {'lever':<24}{'at most':>10}   {'between':<14}"]
    for found in profile.ceilings:
        mark = "" if found.speedup >= WORTH else "   not worth trying"
        kind = "exact" if found.lever.exact else "lossy"
        between = f"{found.low:.2f}x and {found.high:.2f}x"
        lines.append(f"  {found.lever.name:<24}{found.speedup:>9.2f}x   {between:<18}{kind}{mark}")
    if profile.usage:
        lines.append("")
        for name in ("cpu", "memory"):
            values = [getattr(sample, name) for sample in profile.usage]
            lines.append(f"  {name:<10}{sum(values) / len(values):>6.0%}  {sparkline(values)}")
        for name in ("disk", "network"):
            values = [getattr(sample, name) for sample in profile.usage]
            top = max(values) or 1.0
            lines.append(
                f"  {name:<10}{sum(values) / len(values) / 1e6:>6.1f}  {sparkline([v / top for v in values])}  MB/s"
            )
        for number in range(len(profile.usage[0].gpu)):
            values = [sample.gpu[number] for sample in profile.usage]
            lines.append(f"  gpu {number:<6}{sum(values) / len(values):>6.0%}  {sparkline(values)}")
    lines += [f"\n{note}" for note in profile.notes]
    return "\n".join(lines)


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.1f} ms"
