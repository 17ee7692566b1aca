"""From `loss()` to the ledger without a synchronisation: statistics stay in flight until the planner needs them."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from salience.errors import Misattributed
from salience.ledger.embeddings import Embeddings
from salience.ledger.exchange import exchange
from salience.ledger.ledger import Ids, Ledger, Rows, has_doubles, id_order
from salience.ledger.statistics import FEATURE_ROWS, NORM_ROWS, finish, reduce_batch
from salience.ranks import Ranks

Flags = tuple[int, bool, bool]
"""window, seen, trained."""

HOLD = 128
"""Batches entered into the ledger together: fewer, larger array operations."""
FEW = 8
"""The same where only losses are known: then the arrays should stay in the processor's cache."""
TOGETHER = 16
"""Batches whose statistics are made together on a device: a training step waits for each launch there, small or large."""
LARGE = 1 << 20
"""Bytes of logits from which a batch is reduced at once rather than held on the device."""


@dataclass(slots=True)
class _Pending:
    ids: Ids
    names: tuple[str, ...]
    values: Tensor
    """float32 [rows, B] in host memory, valid once `copied` has happened."""
    window: int
    copied: torch.cuda.Event | None = None
    kept: Tensor | None = None
    """Positions in `ids` that go into a gradient, where only some do."""
    hint: Tensor | None = None
    """Integer targets as they were delivered with the batch, to catch a look-ahead loop at once."""
    seen: bool = True
    trained: bool = True
    number: int | None = None
    """Of the batch in a plan in which no id stands twice."""


@dataclass(slots=True)
class _OnDevice:
    """A batch whose statistics are still to be made."""

    item: _Pending
    losses: Tensor
    logits: Tensor | None
    targets: Tensor | None

    @property
    def kind(self) -> tuple[object, ...]:
        """What batches must share to be reduced together."""
        z, y = self.logits, self.targets
        return (
            self.losses.dtype,
            self.losses.device,
            None if z is None else (z.dtype, z.shape[1]),
            None if y is None else y.dtype,
        )


_AFTERWARDS = {NORM_ROWS: 1, FEATURE_ROWS: 2}


class Recorder:
    """Collects batches and enters them into the ledger, each as if it had been entered at once."""

    def __init__(self, ledger: Ledger, ranks: Ranks | None = None, *, together: int | None = None) -> None:
        self.ledger = ledger
        self._together = together
        """Batches reduced together; None = one on the CPU, TOGETHER elsewhere."""
        self._on_device: list[_OnDevice] = []
        self.bad = 0
        """Losses that were not finite since this was last set to 0."""
        self.embeddings: Embeddings | None = None
        """Where features go; with several ranks, on rank 0."""
        self._ranks = ranks
        self._pending: deque[_Pending] = deque()
        self._hints_hold = True

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
        number: int | None = None,
    ) -> None:
        """Take one batch. With its `number` in a plan without doubles, nobody has to look for them."""
        hint = hint if targets is not None and self._hints_hold else None
        item = _Pending(ids, (), _NOTHING, window, hint=hint, trained=trained, number=number)
        together = self._together or (1 if losses.device.type == "cpu" else TOGETHER)
        large = logits is not None and logits.numel() * logits.element_size() > LARGE
        if together == 1 or large:
            self._reduce([_OnDevice(item, losses, logits, targets)])
            return
        # What the caller does with its tensors afterwards is no concern of ours: a copy costs one small launch each.
        z, y = (None if part is None else part.detach().to(losses.device, copy=True) for part in (logits, targets))
        held = _OnDevice(item, losses.detach().clone(), z, y)
        if self._on_device and self._on_device[-1].kind != held.kind:
            self._reduce_all()
        self._on_device.append(held)
        if len(self._on_device) >= together:
            self._reduce_all()

    def _reduce_all(self) -> None:
        held, self._on_device = self._on_device, []
        if held:
            self._reduce(held)

    def _reduce(self, held: list[_OnDevice]) -> None:
        """Make the statistics of batches of one kind, send them to the host in one piece, and hand every batch its part."""
        losses, logits, targets = ([getattr(h, name) for h in held] for name in ("losses", "logits", "targets"))
        names, values = reduce_batch(
            _joined(losses),
            None if logits[0] is None else _joined(logits),
            None if targets[0] is None else _joined(targets),
        )
        values, copied = _to_host(values)
        start = 0
        for h in held:
            item, stop = h.item, start + len(h.losses)
            item.names, item.values, item.copied = names, values[:, start:stop], copied
            start = stop
            if item.hint is not None and copied is None and self._ranks is None:  # ranks find out together, in flush()
                self._check_hint(item)
            self._hold(item)

    def trained(self, ids: Ids, kept: Tensor | None, *, window: int) -> None:
        """Count samples that were recorded as seen before as trained: all of `ids` or the `kept` positions of them."""
        copied = None
        if kept is not None:
            kept, copied = _to_host(kept.detach())
        self._reduce_all()  # they were seen before
        self._hold(_Pending(ids, (), _NOTHING, window, copied, kept=kept, seen=False))

    def norms(self, ids: Ids, squares: Tensor, scale: Tensor, kept: Tensor | None = None, *, window: int) -> None:
        """Gradients of samples that were recorded before (all of `ids` or the `kept` positions of them), after the
        backward pass: the squared norm, [B], and by what number each had been multiplied."""
        if kept is not None:
            kept, _ = _to_host(kept.detach())
        # Copied after `kept`, so that one event stands for both.
        values, copied = _to_host(torch.stack((squares, scale)).to(torch.float32))
        self._hold(_Pending(ids, NORM_ROWS, values, window, copied, kept=kept, seen=False, trained=False))

    def features(self, ids: Ids, vectors: Tensor, kept: Tensor | None = None, *, window: int) -> None:
        """Features [B, 128] of samples that are recorded besides (all of `ids` or the `kept` positions of them)."""
        if kept is not None:
            kept, _ = _to_host(kept.detach())
        values, copied = _to_host(vectors.detach().to(torch.float32).T.contiguous())
        self._hold(_Pending(ids, FEATURE_ROWS, values, window, copied, kept=kept, seen=False, trained=False))

    def _hold(self, item: _Pending) -> None:
        self._pending.append(item)
        if self._ranks is None and len(self._pending) >= HOLD:
            self._enter([self._pending.popleft() for _ in range(len(self._pending)) if _arrived(self._pending[0])])

    def flush(self) -> None:
        """Enter everything recorded so far; with several ranks this is a collective call."""
        self._reduce_all()
        items = list(self._pending)
        self._pending.clear()
        for item in items:
            if item.copied is not None:
                item.copied.synchronize()
        if self._ranks is None:
            self._enter(items)
        else:
            self._enter_of_all_ranks(items)

    def _enter(self, items: list[_Pending]) -> None:
        """Enter batches one after the other, or in one go where no id stands twice and so the order cannot matter."""
        for item in items:
            if item.hint is not None and item.copied is not None:
                self._check_hint(item)
        # Norms and features touch nothing else: behind the others they do not part what can be entered together.
        for run in _alike(sorted(items, key=lambda item: _AFTERWARDS.get(item.names, 0))):
            ids = np.concatenate([item.ids for item in run])
            unique = run[0].seen and _different(run)
            many = len(run[0].names) > 2
            order = id_order(ids) if run[0].seen and (many or not unique) else None
            if not unique and (order is None or has_doubles(ids[order])):
                for item in run:
                    self._enter_one(item.ids, item.values.numpy(), item)
                continue
            values = np.concatenate([item.values.numpy() for item in run], axis=-1)
            if order is not None:  # with many columns to visit, going through memory from front to back pays
                ids, values = ids[order], np.take(values, order, axis=1)
            self._enter_one(ids, values, run[0], unique=True)

    def _enter_one(self, ids: Ids, values: np.ndarray, like: _Pending, *, unique: bool = False) -> None:
        if not like.seen and like.kept is not None:
            ids = ids[like.kept.numpy()]
        self._record(ids, like.names, values, _flags(like), unique=unique)

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
        if "target" in rows:
            self.ledger.check_labels(ids, rows["target"].astype(np.int32))
        self.bad += self.ledger.record(ids, rows, window=window, seen=seen, trained=trained, unique=unique)

    def _enter_of_all_ranks(self, items: list[_Pending]) -> None:
        assert self._ranks is not None
        trouble: Exception | None = None
        try:
            for item in items:
                if item.hint is not None:
                    self._check_hint(item)
        except Misattributed as error:
            trouble, items = error, []
        # Every rank must take part in the exchange even when it has trouble of its own, or the others wait forever.
        for ids, names, values, flags in exchange(
            self._ranks,
            [(i.ids if i.kept is None else i.ids[i.kept.numpy()], i.names, i.values.numpy(), _flags(i)) for i in items],
        ):
            if self._ranks.leads_node or names == FEATURE_ROWS:
                try:
                    self._record(ids, names, values, flags)
                except Misattributed as error:
                    trouble = trouble or error
        self._ranks.agree(
            trouble,
            Misattributed("Another rank recorded losses for the wrong samples; its message says which."),
        )

    def _check_hint(self, item: _Pending) -> None:
        """Targets given to loss() must be those delivered with the batch, or a function of them (a remapped class)."""
        delivered = item.hint.numpy() if item.hint is not None else np.empty(0)
        given = item.values[item.names.index("target")].numpy().astype(np.int64)
        item.hint = None
        if len(delivered) != len(given) or np.array_equal(delivered, given):
            return
        pairs = np.unique(np.stack((delivered, given)), axis=1)
        if len(np.unique(pairs[0])) == pairs.shape[1]:
            self._hints_hold = False
            return
        raise Misattributed(
            f"The targets passed to loss() are not those of the batch delivered last ({int((delivered != given).sum())} "
            f"of {len(given)} differ). A loop that fetches ahead must use with_ids=True and pass ids= to loss()."
        )


_NOTHING = torch.empty(0)


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


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


def _alike(items: list[_Pending]) -> list[list[_Pending]]:
    """Neighbouring batches that carry the same statistics and may be entered together."""
    runs: list[list[_Pending]] = []
    for item in items:
        joins = bool(runs) and item.kept is None and runs[-1][0].kept is None
        joins = joins and (len(item.names) > 2 or len(runs[-1]) < FEW)
        if joins and _flags(runs[-1][0]) == _flags(item) and runs[-1][0].names == item.names:
            runs[-1].append(item)
        else:
            runs.append([item])
    return runs


def _different(run: list[_Pending]) -> bool:
    """Whether the batches are different ones of a plan without doubles."""
    numbers = {item.number for item in run}
    return None not in numbers and len(numbers) == len(run)


def _flags(item: _Pending) -> Flags:
    return item.window, item.seen, item.trained


def _rows(names: tuple[str, ...], values: np.ndarray) -> Rows:
    return finish(dict(zip(names, values, strict=True))) if names else {"loss": np.empty(0, dtype=np.float32)}
