"""Length-aware batches: as many samples per batch as fit into a number of tokens, of similar length, each with its weight."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from salience.errors import ConfigError
from salience.plan import FRESH, VIEW_SHIFT, Plan, Shard, Trace
from salience.run.balancing import cut_by_cost
from salience.run.lengths import Lengths
from salience.run.part import Part, Setup, Voice
from salience.run.planning import Planning
from salience.seeds import LENGTHS, generator

STEPS_SORTED_TOGETHER = 64
"""Steps whose samples are sorted by length together: enough for little padding, few enough that batches stay a random mix."""

Ids = npt.NDArray[np.int64]


class ByLength(Part):
    """Cuts every plan into batches of at most `most` tokens, padding included, and says how much padding that saved."""

    name = "by_length"

    def __init__(self, setup: Setup, voice: Voice, lengths: Lengths, most: int) -> None:
        self._setup, self._voice, self.lengths, self.most = setup, voice, lengths, most
        self._tokens = self._padded = self._plain = 0
        """Tokens of all windows so far, and those with padding: as batched, and in batches of equal numbers of samples."""

    def grown(self, lengths: Lengths) -> None:
        """The data set has grown: lengths of all samples."""
        self.lengths = lengths

    def divide(self, plan: Plan) -> Shard:
        """The plan in the order of its batches, and this rank's part of each."""
        setup, lengths = self._setup, self.lengths[plan.ids]
        parts, steps = _into_steps(lengths, self.most, setup.world)
        rng = generator(setup.seed, LENGTHS, plan.window)
        steps = [steps[k] for k in rng.permutation(len(steps)).tolist()]
        order = np.concatenate([parts[k] for step in steps for k in step])
        sizes = np.array([[len(parts[k]) for k in step] for step in steps], dtype=np.int64).T
        ends = np.cumsum(sizes.sum(axis=0))
        cuts = np.concatenate((np.zeros((1, len(steps)), dtype=np.int64), np.cumsum(sizes, axis=0))) + (
            ends - sizes.sum(axis=0)
        )
        real = np.array([sum(int((parts[k] < len(plan)).sum()) for k in step) for step in steps], dtype=np.int64)
        tokens = np.array([sum(_known(lengths, parts[k]).sum() for k in step) for step in steps], dtype=np.float64)
        self._measure(plan.window, lengths, [_known(lengths, part) for part in parts])
        return Shard(
            plan=_ordered(plan, order), rank=setup.rank, cuts=cuts, global_sizes=real,
            fill=tokens / tokens.mean() if tokens.any() else np.ones(len(steps)),
        )  # fmt: skip

    def _measure(self, window: int, lengths: Lengths, batches: list[Lengths]) -> None:
        tokens, padded = int(lengths.sum()), sum(len(batch) * int(batch.max(initial=0)) for batch in batches)
        size = max(1, round(len(lengths) / len(batches)))
        starts = np.arange(0, len(lengths), size)
        plain = int((np.maximum.reduceat(lengths, starts) * np.diff(np.append(starts, len(lengths)))).sum())
        self._tokens, self._padded, self._plain = self._tokens + tokens, self._padded + padded, self._plain + plain
        self._voice.events.emit(
            "lengths", window=window, batches=len(batches), tokens=tokens, padded=padded, plain=plain,
            padding_saved=1 - padded / max(1, plain),
        )  # fmt: skip

    @property
    def padding_saved(self) -> float:
        """Share of the tokens that batches of equal numbers of samples would have had, and these have not."""
        return 1 - self._padded / max(1, self._plain)

    def report(self) -> str:
        if not self._padded:
            return ""
        padding, plain = 1 - self._tokens / self._padded, 1 - self._tokens / max(1, self._plain)
        return (
            f"Batches hold up to {self.most:,} tokens, {padding:.1%} of them padding; batches of equal numbers of samples "
            f"would have had {plain:.1%}, so {self.padding_saved:.1%} fewer tokens are computed."
        )


def mean_samples(lengths: Lengths, most: int) -> float:
    """About how many samples fit into a batch of `most` tokens."""
    return max(1.0, most / float(np.maximum(lengths, 1).mean()))


def check_options(planning: Planning, *, even: bool, drop_last: bool, divides: bool) -> None:
    """Raise ConfigError for options that mean nothing where batches are measured in tokens."""
    if even:
        raise ConfigError(
            "even=True fixes the number of batches, which batch_tokens= leaves to the lengths; choose one."
        )
    if drop_last:
        raise ConfigError(
            "drop_last=True is for batches of equal numbers of samples; batch_tokens= leaves nothing out."
        )
    if divides:
        raise ConfigError("batch_tokens= gives ranks equal work already; leave out balance= and costs=.")
    config = planning.config
    if isinstance(config, Trace):
        raise ConfigError("A trace has the batches it was recorded with; replay it without batch_tokens=.")
    if config is not None and config.steps == "constant":
        raise ConfigError('steps = "constant" shrinks batches of samples; with batch_tokens= use steps = "fewer".')


def token_batches(lengths: Lengths, most: int, together: int) -> Iterator[Ids]:
    """Positions of the samples of each batch, the longest first; count * longest is at most `most`, and each occurs once.

    The samples of `together` are sorted by length at a time. What is left of them, which does not fill a batch, is sorted
    with those that follow, so that only the last batch can be a small one.
    """
    left = np.empty(0, dtype=np.int64)
    for start in range(0, len(lengths), together):
        stop = min(start + together, len(lengths))
        pool = np.concatenate((left, np.arange(start, stop)))
        pool = pool[np.argsort(-lengths[pool], kind="stable")]
        at = 0
        while at < len(pool):
            count = most // max(1, int(lengths[pool[at]]))
            if at + count > len(pool) and stop < len(lengths):
                break
            yield pool[at : at + count]
            at += count
        left = pool[at:]


def _into_steps(lengths: Lengths, most: int, world: int) -> tuple[list[Ids], list[range]]:
    """The batches of all ranks, and which of them each step has, `world` each; they are neighbours in length.

    The last step divides what is left so that all ranks take equally long; where there are fewer samples than ranks, visits
    from `len(lengths)` on fill it up.
    """
    mean = max(1.0, float(np.maximum(lengths, 1).mean()))
    parts = list(token_batches(lengths, most, max(1, round(STEPS_SORTED_TOGETHER * world * most / mean))))
    whole = len(parts) // world * world
    if whole < len(parts):
        rest = np.concatenate(parts[whole:])
        rest = rest[np.argsort(-lengths[rest], kind="stable")]
        lacking = world - len(rest)
        if lacking > 0:
            rest = np.append(rest, len(lengths) + np.arange(lacking))
        costs = np.maximum(_known(lengths, rest, filler=1), 1).astype(np.float64)
        cuts = cut_by_cost(costs, np.full(world, 1 / world))
        parts[whole:] = [rest[cuts[rank] : cuts[rank + 1]] for rank in range(world)]
    return parts, [range(k, k + world) for k in range(0, len(parts), world)]


def _known(lengths: Lengths, positions: Ids, filler: int = 0) -> Lengths:
    """Lengths of these positions; visits beyond the plan only fill up and have `filler`."""
    inside = positions < len(lengths)
    return np.where(inside, lengths[np.where(inside, positions, 0)], filler)


def _ordered(plan: Plan, order: Ids) -> Plan:
    """The plan in this order. Positions beyond its end are visits of no weight, not recorded."""
    inside = order < len(plan)
    at = np.where(inside, order, 0)
    return replace(
        plan, ids=plan.ids[at], weights=np.where(inside, plan.weights[at], np.float32(0)),
        importance=plan.importance[at],
        level=np.where(inside, plan.level[at], np.uint8(FRESH | 1 << VIEW_SHIFT)),
    )  # fmt: skip
