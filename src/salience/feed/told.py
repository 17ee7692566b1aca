"""What a cache did, in words."""

from __future__ import annotations

from collections.abc import Mapping


def told(counts: Mapping[str, int], budget: int) -> str:
    """Bytes the store sent against what no cache, LRU, never-evict and the best possible cache would have had it send."""
    wanted, sent = counts["bytes"], counts["bytes_used"]
    text = (
        f"Cache of {size(budget)}: {counts['hits']:,} of {counts['samples']:,} samples were in it; the store sent "
        f"{size(counts['bytes_sent'])}. Without a cache it would have sent {size(wanted)}, with LRU "
        f"{size(counts['lru_bytes'])}, with one that never evicts {size(counts['never_evict_bytes'])}; for these plans no "
        f"cache of this size could have done with less than {size(counts['bound_bytes'])}."
    )
    for tier in ("disk", "redis"):
        if counts[f"{tier}_bytes"]:
            text += f" {size(counts[f'{tier}_bytes'])} came from {tier}."
    if sent > wanted:
        text += f" {size(sent - wanted)} were read more than once, since the run was interrupted."
    return text


def size(count: float) -> str:
    """Bytes as people read them."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:,.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
