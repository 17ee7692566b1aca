"""From `loss()` to the ledger without a synchronisation: statistics stay in flight until the planner needs them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from salience.errors import Misattributed
from salience.ledger.collect import Collected
from salience.ledger.embeddings import Embeddings
from salience.ledger.exchange import Flags, exchange
from salience.ledger.ledger import Ids, Ledger, Rows, has_doubles, id_order
from salience.ledger.statistics import FEATURE_ROWS, NORM_ROWS, finish, reduce_batch
from salience.ranks import Ranks

SAMPLES_ENTERED_TOGETHER = 4096
"""Samples entered into the ledger in one go: few array operations, on arrays that stay in the processor's cache."""

MIN_SAMPLES_TO_SORT = 1 << 17
"""In a ledger of more samples than this, columns are visited in the order of the ids."""


Delivered = tuple[Tensor | None, Sequence[Tensor]]
"""The integer targets of a batch, and everything that may be its targets where they are not known."""
_CONFIRMED: Delivered = None, ()
"""Nothing is left to be compared."""


@dataclass(slots=True)
class _Pending:
    """Batches whose statistics stand side by side in one matrix."""

    ids: Sequence[Ids]
    names: tuple[str, ...]
    values: Tensor
    """float32 [rows, samples] in host memory, valid once `copied` has happened."""
    flags: Flags
    copied: torch.cuda.Event | None = None
    kept: Tensor | None = None
    """Positions in `ids` (of one batch) that go into a gradient, where only some do."""
    hints: Sequence[Delivered] = ()
    """What was delivered with each batch, as far as its targets have still to be compared with that."""
    numbers: Sequence[int | None] = ()
    """Number of each batch in its plan; None if the plan has an id twice."""

    def batches(self) -> Iterator[tuple[Ids, Tensor]]:
        """Ids (of one batch: the kept ones) and values of each batch."""
        ids = self.ids if self.kept is None else [self.ids[0][self.kept.numpy()]]
        sizes = [len(part) for part in ids]
        return zip(ids, self.values.split(sizes, dim=1) if self.names else [_NOTHING] * len(sizes), strict=True)


_AFTERWARDS = {NORM_ROWS: 1, FEATURE_ROWS: 2}


class Recorder:
    """Collects batches and enters them into the ledger, each as if it had been entered at once."""

    def __init__(self, ledger: Ledger, ranks: Ranks | None = None, *, together: int | None = None) -> None:
        """At most `together` batches are reduced together; by default as many as are worth it."""
        self.ledger = ledger
        self._collected = Collected[Flags, tuple[Ids, Delivered, int | None]](together)
        """Ids, what is to be compared, and number of the batches whose statistics have not been computed yet."""
        self._flags = Flags(-1, True, True)
        """Those of the batch recorded last."""
        self._features = Collected[None, Ids]()
        self.bad = 0
        """Number of losses that were not finite since this was last set to 0."""
        self.embeddings: Embeddings | None = None
        """Where features go; with several ranks, on rank 0."""
        self._ranks = ranks
        self._pending: deque[_Pending] = deque()
        self._waiting = 0
        """Samples in `_pending`."""
        self._hints_hold = True
        """True until targets were seen to be a function of those delivered (a remapped class): then they are not compared."""
        self._confirmed = True
        """True while all targets were those delivered with their batch: then a sample that has two was given both."""
        self.redrawn: int | None = None
        """A sample whose target was drawn anew at its second visit; from then on classes are ignored."""
        self.without_class = 0
        """Number of visits with a target that names no class."""

    def record(
        self,
        ids: Ids,
        losses: Tensor,
        logits: Tensor | None = None,
        targets: Tensor | None = None,
        *,
        window: int,
        trained: bool = True,
        hint: Tensor | None = None,
        columns: Sequence[Tensor] = (),
        number: int | None = None,
    ) -> None:
        """Record one batch. Its `number` in a plan without duplicates makes the search for duplicates unnecessary."""
        if not len(ids):
            return
        delivered = _CONFIRMED if targets is hint else self._unchecked(hint, columns, targets)
        if self._flags[0] != window or self._flags[2] is not trained:
            self._flags = Flags(window, True, trained)
        if self._collected.add((ids, delivered, number), (losses, logits, targets), self._flags):
            self._reduce()

    def forget(self) -> None:
        """Drop what was recorded but not entered yet, because the ledger is set to another state."""
        self._collected.clear()
        self._features.clear()
        self._pending.clear()
        self.bad = self._waiting = 0

    def _reduce(self) -> None:
        """Compute the statistics of the batches since the last call, and send them to the host in one piece."""
        for flags, batches, (losses, logits, targets) in self._collected.take():
            assert losses is not None
            names, values = reduce_batch(losses, logits, targets)
            values, copied = _to_host(values)
            ids = [of for of, _, _ in batches]
            hints, numbers = [hint for _, hint, _ in batches], [number for _, _, number in batches]
            self._hold(_Pending(ids, names, values, flags, copied, hints=hints, numbers=numbers))

    def trained(self, ids: Ids, kept: Tensor | None, *, window: int) -> None:
        """Count samples as trained that were recorded as seen before: `ids`, or the `kept` positions of them."""
        copied = None
        if kept is not None:
            kept, copied = _to_host(kept.detach())
        self._reduce()  # they were seen before
        self._hold(_Pending([ids], (), _NOTHING, Flags(window, False, True), copied, kept=kept))

    def norms(self, ids: Ids, squares: Tensor, scale: Tensor, kept: Tensor | None = None, *, window: int) -> None:
        """Record gradient norms after the backward pass, for samples that were recorded before (`ids`, or `kept` of them).

        `squares` are squared norms, [B], and `scale` is the factor that each gradient contains.
        """
        if kept is not None:
            kept, _ = _to_host(kept.detach())
        # Copied after `kept`, so that one event stands for both.
        values, copied = _to_host(torch.stack((squares, scale)).to(torch.float32))
        self._hold(_Pending([ids], NORM_ROWS, values, Flags(window, False, False), copied, kept=kept))

    def features(self, ids: Ids, vectors: Tensor, kept: Tensor | None = None, *, window: int) -> None:
        """Record features, [B, 128], of the samples `ids`, or of the `kept` positions of them."""
        if kept is not None:
            kept, _ = _to_host(kept.detach())
            values, copied = _to_host(vectors.detach().to(torch.float32, copy=True))
            flags = Flags(window, False, False)
            self._hold(_Pending([ids], FEATURE_ROWS, values.T, flags, copied, kept=kept))
        elif self._features.add(ids, (vectors,), None):
            self._send_features()

    def _send_features(self) -> None:
        """Send the features collected so far to the host. The window they are from does not matter."""
        for _, ids, (vectors,) in self._features.take():
            assert vectors is not None
            values, copied = _to_host(vectors.detach().to(torch.float32, copy=True))
            self._hold(_Pending(ids, FEATURE_ROWS, values.T, Flags(0, False, False), copied))

    def _hold(self, item: _Pending) -> None:
        self._pending.append(item)
        self._waiting += sum(map(len, item.ids))
        if self._ranks is None and self._waiting >= SAMPLES_ENTERED_TOGETHER:
            items = [self._pending.popleft() for _ in range(len(self._pending)) if _arrived(self._pending[0])]
            self._waiting -= sum(len(ids) for item in items for ids in item.ids)
            self._enter(items)

    def flush(self) -> None:
        """Enter everything recorded so far; with several ranks this is a collective call."""
        self._reduce()
        self._send_features()
        items = list(self._pending)
        self._pending.clear()
        self._waiting = 0
        for item in items:
            if item.copied is not None:
                item.copied.synchronize()
        if self._ranks is None:
            self._enter(items)
        else:
            self._enter_of_all_ranks(items)

    def _enter(self, items: list[_Pending]) -> None:
        """Enter batches one after the other, or all at once if no id occurs twice and the order cannot matter."""
        for item in items:
            self._check_hints(item)
        # Norms and features have columns of their own: sorted to the end, they do not split up groups of other batches.
        for group in _grouped(sorted(items, key=lambda item: _AFTERWARDS.get(item.names, 0))):
            first, batches = group[0], [ids for item in group for ids in item.ids]
            if not first.flags.seen:
                for item in group:
                    for ids, values in item.batches():
                        self._record(ids, item.names, values.numpy(), item.flags)
                continue
            ids = batches[0] if len(batches) == 1 else np.concatenate(batches)
            unique = _no_id_twice(group)
            order = id_order(ids) if not unique or self.ledger.n > MIN_SAMPLES_TO_SORT else None
            if not unique and order is not None and has_doubles(ids[order]):
                for item in group:
                    for ids, values in item.batches():
                        self._record(ids, item.names, values.numpy(), item.flags)
                continue
            values = [item.values.numpy() for item in group]
            values = values[0] if len(values) == 1 else np.concatenate(values, axis=1)
            if order is not None:  # in a long ledger, going through memory from front to back pays
                ids, values = ids[order], np.take(values, order, axis=1)
            self._record(ids, first.names, values, first.flags, unique=True)

    def _record(
        self, ids: Ids, names: tuple[str, ...], values: np.ndarray, flags: Flags, *, unique: bool = False
    ) -> None:
        window, seen, trained = flags
        if names == FEATURE_ROWS:
            if self.embeddings is not None:
                self.embeddings.record(ids, np.ascontiguousarray(values.T))
            return
        rows = _rows(names, values)
        if names == NORM_ROWS:
            known = np.isfinite(rows["grad_norm"])
            self.ledger.grad_norm[ids[known]] = rows["grad_norm"][known]
            return
        named = self._named(ids, rows) if "target" in rows else None
        if named is None or named.all():
            self.bad += self.ledger.record(ids, rows, window=window, seen=seen, trained=trained, unique=unique)
            return
        for part, columns in ((named, tuple(rows)), (~named, ("loss",))):
            if part.any():
                some = {name: rows[name][part] for name in columns}
                self.bad += self.ledger.record(
                    ids[part], some, window=window, seen=seen, trained=trained, unique=unique
                )

    def _named(self, ids: Ids, rows: Rows) -> npt.NDArray[np.bool_]:
        """Which rows have a class, bool [B], checked against what is known."""
        target = rows["target"]
        named = target >= 0
        self.without_class += len(named) - int(np.count_nonzero(named))
        if self.redrawn is None:
            try:
                self.ledger.check_labels(ids[named], target[named].astype(np.int32))
            except Misattributed:
                if not self._confirmed:
                    raise
                known = self.ledger.label[ids]
                self.redrawn = int(ids[named & (known >= 0) & (known != target)][0])
                self.ledger.label[:] = -1
        return named if self.redrawn is None else np.zeros_like(named)

    def _enter_of_all_ranks(self, items: list[_Pending]) -> None:
        assert self._ranks is not None
        trouble: Exception | None = None
        try:
            for item in items:
                self._check_hints(item)
        except Misattributed as error:
            trouble, items = error, []
        # Every rank must take part in the exchange even when it has trouble of its own, or the others wait forever.
        mine = [(ids, item.names, values.numpy(), item.flags) for item in items for ids, values in item.batches()]
        for ids, names, values, flags in exchange(self._ranks, mine):
            if self._ranks.leads_node or names == FEATURE_ROWS:
                try:
                    self._record(ids, names, values, flags)
                except Misattributed as error:
                    trouble = trouble or error
        self._ranks.agree(
            trouble,
            Misattributed("Another rank recorded losses for the wrong samples; its message says which."),
        )

    def _unchecked(self, hint: Tensor | None, columns: Sequence[Tensor], targets: Tensor | None) -> Delivered:
        """Compare now if that needs no synchronisation; returns what is left to be compared later."""
        if targets is None or targets is hint or not (self._confirmed if hint is None else self._hints_hold):
            return _CONFIRMED
        if hint is None and not columns:
            self._confirmed = False
            return _CONFIRMED
        if targets.device.type != "cpu" or self._ranks is not None:  # ranks find out together, in flush()
            return hint, columns
        self._check((hint, columns), targets.detach().numpy())
        return _CONFIRMED

    def _check_hints(self, item: _Pending) -> None:
        hints, item.hints = item.hints, ()
        if any(hint is not None or columns for hint, columns in hints):
            for delivered, (_, values) in zip(hints, item.batches(), strict=True):
                if delivered[0] is not None or delivered[1]:
                    self._check(delivered, values[item.names.index("target")].numpy().astype(np.int64))

    def _check(self, delivered: Delivered, given: npt.NDArray[Any]) -> None:
        """Targets given to loss() must be those delivered with the batch, or a function of them (a remapped class)."""
        hint, columns = delivered
        numbers = (part.detach().double().flatten().numpy() for part in columns)
        if (hint is not None and np.array_equal(hint.numpy(), given)) or any(_agree(part, given) for part in numbers):
            return
        self._confirmed = False
        if hint is None or not self._hints_hold or len(hint) != len(given):
            return
        expected = hint.numpy()
        pairs = np.unique(np.stack((expected, given)), axis=1)
        if len(np.unique(pairs[0])) == pairs.shape[1]:
            self._hints_hold = False
            return
        raise Misattributed(
            f"The targets passed to loss() are not those of the batch delivered last ({int((expected != given).sum())} "
            f"of {len(given)} differ). A loop that fetches ahead must use with_ids=True and pass ids= to loss()."
        )


def _agree(delivered: npt.NDArray[np.float64], given: npt.NDArray[Any]) -> bool:
    """True if they are the same, where a target names a class at all."""
    return len(delivered) == len(given) and bool(((delivered == given) | (given < 0)).all())


_NOTHING = torch.empty(0)


def _to_host(values: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
    """A host copy of `values`; from a GPU it is in flight until the event returned with it has happened."""
    if values.device.type == "cpu":
        return values, None
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=values.device.type == "cuda")
    host.copy_(values, non_blocking=True)
    if values.device.type != "cuda":
        return host, None
    copied = torch.cuda.Event()
    copied.record(torch.cuda.current_stream(values.device))
    return host, copied


def _arrived(item: _Pending) -> bool:
    return item.copied is None or item.copied.query()


def _grouped(items: list[_Pending]) -> list[list[_Pending]]:
    """Groups of neighbours that carry the same statistics and may be entered together."""
    groups: list[list[_Pending]] = []
    size = 0
    for item in items:
        count = sum(map(len, item.ids))
        joins = bool(groups) and size + count <= SAMPLES_ENTERED_TOGETHER
        if joins and groups[-1][0].flags == item.flags and groups[-1][0].names == item.names:
            groups[-1].append(item)
            size += count
        else:
            groups.append([item])
            size = count
    return groups


def _no_id_twice(group: list[_Pending]) -> bool:
    """True if it is known without a search: these are different batches of a plan in which no id occurs twice."""
    numbers = [number for item in group for number in item.numbers]
    return None not in numbers and len(set(numbers)) == len(numbers)


def _rows(names: tuple[str, ...], values: npt.NDArray[np.float32]) -> Rows:
    return finish(dict(zip(names, values, strict=True))) if names else {"loss": np.empty(0, dtype=np.float32)}
