"""What was done with the stages, in words."""

from __future__ import annotations

from salience.treat.treating import Treating


def told(treating: Treating) -> str:
    """Cost of each stage, how often samples were fresh, what that saved."""
    counts, costs = treating.counts, treating.costs
    lines = ["Stages, microseconds a call: " + ", ".join(f"{label} {cost:,.0f}" for label, cost in costs.items()) + "."]
    visits = max(1, counts["visits"])
    made = counts["fresh"] + counts["stored"]
    lines.append(
        f"Of {counts['visits']:,} visits {made:,} ({made / visits:.0%}) were fresh throughout and {counts['reused']:,} took up "
        f"an intermediate ({counts['missed']:,} of them had to make it again; {counts['unfit']:,} could not be kept)."
    )
    least, median, most = treating.fresh_shares
    lines.append(f"A sample was fresh at {least:.0%} (least), {median:.0%} (median), {most:.0%} (most) of its visits.")
    if treating.split is not None:
        before = [stage.label for stage in treating.stages[: treating.split.stages]]
        lines.append(
            f"Intermediates lie after {', '.join(before) or 'reading'}, {treating.split.size:,} bytes each; that saved "
            f"{treating.saved:.1f} seconds of workers' time."
        )
        if treating.frozen:
            lines.append(
                f"Draws kept with them, for {treating.config.r_max} visits at most: {', '.join(treating.frozen)}."
            )
    return "\n".join(lines)
