"""A profile as text, for the terminal."""

from __future__ import annotations

from salience.events import BottleneckFound
from salience.report.words import times


def rendered(profile: BottleneckFound) -> str:
    """The sentence first, then where the time of a step goes, what levers could gain, how busy the machine was."""
    costs = profile.costs
    if costs is None:
        return profile.text
    lines = [profile.text, ""]
    alone = f"the loader alone {_ms(costs.input)}, the loop alone {_ms(costs.compute)}"
    lines.append(f"One step takes {_ms(costs.step)} (mean of {costs.steps}); {alone}.")
    if costs.sync:
        lines.append(f"Without gradient sync a step would take {_ms(costs.step - costs.sync)}.")
    lines += ["", f"  {'stage':<24}{'per step':>10}{'share':>8}"]
    total = sum(costs.work.values())
    for name, seconds in sorted(costs.work.items(), key=lambda item: -item[1]):
        where = f"{name} (workers)" if costs.workers else f"{name} (in the loop)"
        lines.append(f"  {where:<24}{_ms(seconds):>10}{seconds / total if total else 0:>8.0%}")
    rows = [
        ("wait", costs.wait),
        ("copy", costs.copy),
        ("forward", costs.forward),
        ("backward + optimizer", costs.backward),
        *([("gradient sync", costs.sync)] if costs.sync else []),
    ]
    for name, seconds in rows if costs.copy else [rows[0], *rows[2:]]:
        lines.append(f"  {name:<24}{_ms(seconds):>10}{seconds / costs.step if costs.step else 0:>8.0%}")
    lines += ["", f"  {'lever':<24}{'at most':>10}   {'between':<14}"]
    for found in profile.levers:
        mark = "" if found.worth else "   not worth trying"
        kind = "exact" if found.exact else "lossy"
        between = f"{times(found.low)} and {times(found.high)}"
        lines.append(f"  {found.name:<24}{times(found.speedup):>10}   {between:<18}{kind}{mark}")
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


def sparkline(values: list[float], width: int = 40) -> str:
    """Shares from 0 to 1 as a line of blocks."""
    if not values:
        return ""
    step = max(1, -(-len(values) // width))
    means = [sum(values[k : k + step]) / len(values[k : k + step]) for k in range(0, len(values), step)]
    return "".join(" ▁▂▃▄▅▆▇█"[round(8 * min(1.0, max(0.0, v)))] for v in means)
