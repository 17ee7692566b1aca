"""A profile as text, for the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from salience.events import BottleneckFound
from salience.report.console import columns
from salience.report.words import times


def rendered(profile: BottleneckFound) -> str:
    """The sentence first, then where the time of a step goes, what levers could gain, how busy the machine was."""
    costs = profile.costs
    if costs is None:
        return profile.text
    alone = f"the loader alone {_ms(costs.input)}, the loop alone {_ms(costs.compute)}"
    said = f"{profile.text}\n\nOne step takes {_ms(costs.step)} (mean of {costs.steps}); {alone}."
    if costs.sync:
        said += f"\nWithout gradient sync a step would take {_ms(costs.step - costs.sync)}."
    where, total = "workers" if costs.workers else "in the loop", sum(costs.work.values()) or 1.0
    stages = [
        (f"{name} ({where})", _ms(seconds), f"{seconds / total:.0%}")
        for name, seconds in sorted(costs.work.items(), key=lambda item: -item[1])
    ]
    parts = {
        "copy": costs.copy,
        "forward": costs.forward,
        "backward + optimizer": costs.backward,
        "gradient sync": costs.sync,
    }
    step = costs.step or 1.0
    loop = {"wait": costs.wait} | {
        name: seconds for name, seconds in parts.items() if seconds or name not in ("copy", "gradient sync")
    }
    stages += [(name, _ms(seconds), f"{seconds / step:.0%}") for name, seconds in loop.items()]
    levers = [
        (
            one.name, times(one.speedup), f"{times(one.low)} and {times(one.high)}", "exact" if one.exact else "lossy",
            "" if one.worth else "not worth trying",
        )
        for one in profile.levers
    ]  # fmt: skip
    tables = [
        columns([("stage", "per step", "share"), *stages], right=(1, 2), indent="  "),
        columns([("lever", "at most", "between", "", ""), *levers], right=(1,), indent="  "),
        _machine(profile),
        *profile.notes,
    ]
    return "\n\n".join([said, *filter(None, tables)])


def _machine(profile: BottleneckFound) -> str:
    """How busy the machine was: mean and sparkline for every part of it."""
    used, rows = profile.usage, list[tuple[str, str, str, str]]()
    if not used:
        return ""
    for name in ("cpu", "memory", "disk", "network", *(f"gpu {k}" for k in range(len(used[0].gpu)))):
        values = [one.gpu[int(name[4:])] if name.startswith("gpu") else getattr(one, name) for one in used]
        bytes_moved, mean = name in ("disk", "network"), sum(values) / len(values)
        top = max(values) or 1.0 if bytes_moved else 1.0
        course = sparkline([value / top for value in values])
        rows.append(
            (name, f"{mean / 1e6:.1f}" if bytes_moved else f"{mean:.0%}", course, "MB/s" if bytes_moved else "")
        )
    return columns(rows, right=(1,), indent="  ")


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.1f} ms"


def sparkline(values: Sequence[float]) -> str:
    """Shares from 0 to 1 as a line of at most 40 blocks."""
    step = max(1, -(-len(values) // 40))
    means = [sum(values[k : k + step]) / len(values[k : k + step]) for k in range(0, len(values), step)]
    return "".join(" ▁▂▃▄▅▆▇█"[round(8 * min(1.0, max(0.0, v)))] for v in means)
