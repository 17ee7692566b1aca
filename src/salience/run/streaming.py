"""Streams: samples without a length and without positions. A window buffers some of them; the ledger has a row per key."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from salience.errors import BrokenSample, DataError, StateError
from salience.events.kinds import StreamRead
from salience.feed.sizes import memory_bytes
from salience.ledger import Ledger
from salience.ledger.keys import Keys
from salience.ledger.ledger import block_bytes
from salience.plan import Plan
from salience.run.buffer import Buffer
from salience.run.part import Part, Setup, Voice
from salience.run.planning import Planning
from salience.select import Clock

DEFAULT_WINDOW = 10_000
"""Samples that a window buffers if `window=` does not say."""
SAMPLES_SENT_TOGETHER = 64
"""Samples that a reading worker sends at a time."""
BATCHES_OBSERVED = 8
"""Batches that a window buffers where nothing is selected, unless `window=` says how many samples."""
NEVER_ENDS = 1_000_000
"""Passes of a run whose number is not known: its curve stays in the middle."""


class Streaming(Part):
    """Reads the samples of a window into a buffer, finds their rows by key, and plans over what is buffered."""

    name = "stream"

    def __init__(
        self,
        setup: Setup,
        voice: Voice,
        stream: Any,
        named: Callable[[Any], Hashable],
        keys: Keys,
        planning: Planning,
        *,
        window: int,
        epochs: int | None,
        options: Mapping[str, Any],
    ) -> None:
        """`options` are those of the DataLoader that reads the stream, if worker processes do."""
        self._setup, self._voice, self.stream, self._named, self.keys = setup, voice, stream, named, keys
        self.epochs, self._options, self._planning = epochs, dict(options), planning
        self.size = max(1, window // setup.global_batch) * setup.global_batch
        """Samples that a window buffers: whole batches."""
        self.buffer = Buffer()
        self.passes = 0
        """Passes that are over, and so the index of the one in progress."""
        self.goes_on = False
        """True from a pass's first window until its last one."""
        self._samples: Iterator[Any] | None = None
        self._ahead: list[Any] = []
        """The sample that showed that the pass goes on after this window."""
        self._skipped = 0
        """Samples that are None between the last one of this window and the one ahead."""
        self._read = 0
        """Samples read of this pass, without the one ahead and those before it that were skipped."""
        self._place: Any = None
        """The stream's own state before the sample ahead was read; None if it has none, or at the beginning of a pass."""
        self._before: dict[str, Any] = {}
        """Where the stream stood before this window was read: what a resume needs."""
        self._lengths: list[int] = []
        """Samples of each pass that has ended."""
        self._excluded = 0
        self._resuming: dict[str, Any] | None = None

    # --- reading a window ---

    def prepare(self, window: int, ledger: Ledger) -> None:
        """Read the samples of the next window. A pass that is over begins anew."""
        if self._samples is None or not self.goes_on:
            self._begin_pass()
        before = {"read": self._read, "state": self._place, "excluded": self._excluded, "lengths": list(self._lengths)}
        with self._voice.watch("stream"):
            self._fill()
        self._before = before

    def _fill(self) -> None:
        counts: dict[str, int] = {"repeated": 0, "empty": 0}
        samples: dict[Hashable, Any] = {}
        while len(samples) < self.size and (found := self._next_valid(counts)) is not None:
            (sample,) = found
            key = self._key(sample)
            counts["repeated"] += key in samples
            samples.setdefault(key, sample)
        if not samples:
            again = " Generators end after one pass; pass an object whose iter() begins anew." if self.passes else ""
            raise DataError(
                f"The stream ({type(self.stream).__name__}) gave no sample in pass {self.passes}, so there is nothing to train "
                f"on.{again}"
            )
        self._place = self.stream.state_dict() if self.seeks else None
        read = self._read
        following = self._next_valid(counts)
        self._ahead, self.goes_on = [] if following is None else [following[0]], following is not None
        self._skipped, self._read = self._read - read - len(self._ahead), read if self._ahead else self._read
        known = len(self.keys)
        rows = self.keys.add(samples)
        self.buffer.hold(rows, list(samples.values()))
        self._note(counts, new=len(self.keys) - known)

    def _next_valid(self, counts: dict[str, int]) -> tuple[Any] | None:
        """The next sample that is one; None at the end of the pass."""
        while (found := self._next()) is not None:
            if found[0] is not None and not isinstance(found[0], BrokenSample):
                return found
            counts["empty"] += 1
        return None

    def _next(self) -> tuple[Any] | None:
        """The next sample of this pass, in a tuple; None at its end."""
        if self._ahead:
            self._read += 1 + self._skipped
            self._skipped = 0
            return (self._ahead.pop(),)
        assert self._samples is not None
        try:
            sample = next(self._samples)
        except StopIteration:
            return None
        except Exception as cause:
            self._samples = None
            raise DataError(
                f"The stream failed after {self._read:,} samples of pass {self.passes} ({type(cause).__name__}: {cause}). What "
                "was delivered is recorded; to go on from there, make a new Loader and load_state_dict(state_dict())."
            ) from cause
        self._read += 1
        return (sample,)

    def _key(self, sample: Any) -> Hashable:
        try:
            return self._named(sample)
        except DataError as cause:
            raise DataError(f"Sample {self._read - 1} of pass {self.passes} of the stream: {cause}") from cause

    def _note(self, counts: Mapping[str, int], *, new: int) -> None:
        """Say what was read, and what of it is left out: repeated keys and broken samples are counted, not lost silently."""
        rows, left_out = len(self.buffer), sum(counts.values())
        self._excluded += left_out
        if counts["repeated"]:
            self._voice.warn_once(
                "The stream gave keys a second time within one window; the first sample of each is used, and the others are "
                "counted (events of kind 'stream'). Name samples by keys= that differ, or by their content."
            )
        if counts["empty"]:
            self._voice.warn_once(
                "The stream gave samples that are None; they are left out and counted (events of kind 'stream')."
            )
        if not self.goes_on:
            self._end_pass()
        event = StreamRead(
            window_pass=self.passes, buffered=rows, new=new, repeated=counts["repeated"], empty=counts["empty"],
            read=self._read, rows=len(self.keys), buffer_bytes=self.buffer.nbytes, keys_bytes=self.keys.nbytes,
            last=not self.goes_on,
        )  # fmt: skip
        self._voice.events.emit(event)

    def _begin_pass(self) -> None:
        """Start the stream from its beginning."""
        self._read, self._skipped, self._ahead, self._place = 0, 0, [], None
        if callable(getattr(self.stream, "set_epoch", None)):
            self.stream.set_epoch(
                self.passes
            )  # a shuffling stream has another order in each pass, the same after a resume
        self._samples = self._iterate()

    def _iterate(self) -> Iterator[Any]:
        if not self._options.get("num_workers"):
            return iter(self.stream)
        read: DataLoader[Any] = DataLoader(
            self.stream, batch_size=SAMPLES_SENT_TOGETHER, collate_fn=_as_list, **self._options
        )
        return (sample for samples in read for sample in samples)

    def _end_pass(self) -> None:
        """Note how long the pass was; warn if it ended earlier than the one before."""
        if self._lengths and self._read < self._lengths[-1]:
            self._voice.warn(
                f"Pass {self.passes} of the stream ended after {self._read:,} samples, and the one before had "
                f"{self._lengths[-1]:,}; training goes on with what came."
            )
        self._lengths.append(self._read)

    # --- planning over the buffer ---

    def plan(self, ledger: Ledger, window: int) -> Plan:
        """The plan of a window: the selection's, over the buffered samples alone. Samples never seen are all visited."""
        ledger.extend(max(ledger.n, len(self.keys)))
        self._setup.grow(ledger.n)
        rows, setup, pipeline = self.buffer.rows, self._setup, self._planning.pipeline
        if pipeline is None:
            ids, ones = rows, np.ones(len(rows), dtype=np.float32)
            return Plan(
                window=window, population=ledger.n, batch_size=setup.global_batch, drop_last=setup.drop_last, ids=ids,
                weights=ones, importance=ones.copy(), level=np.zeros(len(rows), dtype=np.uint8),
            )  # fmt: skip
        part = ledger.taken(rows)
        epoch, epochs = self.passes, NEVER_ENDS if self.epochs is None else max(self.epochs, self.passes + 1)
        new = float((part.seen == 0).mean())
        keep = new + (1 - new) * pipeline.keep(Clock(window=epoch, windows=epochs))
        batch = setup.global_batch if self.goes_on else 1  # only a pass's last window may end with a short batch
        plan = pipeline.plan(
            part, window=window, windows=max(window + 2, epochs * self._windows_per_pass), batch_size=batch, share=keep,
            seed=setup.seed, drop_last=setup.drop_last, force=part.seen == 0,
        )  # fmt: skip
        return replace(
            plan, ids=rows[plan.ids], population=ledger.n, batch_size=setup.global_batch, importance_of_all=None,
        )  # fmt: skip

    @property
    def _windows_per_pass(self) -> int:
        length = self._lengths[-1] if self._lengths else self._read
        return max(1, -(-length // self.size))

    def visits_after(self, window: int, visits: int, steps: int | None = None) -> int | None:
        """Visits to expect after this window; None while nobody knows how long a pass is."""
        length = self._lengths[-1] if self._lengths else self._known_length()
        if self.epochs is None or length is None:
            return None
        pipeline = self._planning.pipeline
        shares = [
            1.0 if pipeline is None else pipeline.keep(Clock(window=epoch, windows=self.epochs))
            for epoch in range(self.passes, self.epochs)
        ]
        left = max(0, length - self._read) if self.goes_on else 0
        return round(left * shares[0] + length * sum(shares[1:])) if shares else 0

    def _known_length(self) -> int | None:
        try:
            return len(self.stream)
        except (TypeError, NotImplementedError):
            return None

    def close(self, *, finished: bool) -> None:
        if not self.goes_on:
            self.passes += 1

    def break_off(self) -> None:
        """The loop was left in the middle of a pass: the next iterator begins a new one, as that of a DataLoader does."""
        if self.goes_on:
            self.passes += 1
        self.goes_on, self._samples, self._ahead = False, None, []

    def report(self) -> str:
        memory = memory_bytes()
        ledger = block_bytes(len(self.keys))
        text = (
            f"The stream gave {len(self.keys):,} samples with different keys in {self.passes} passes. A window buffers up to "
            f"{self.size:,} of them ({self.buffer.nbytes / 2**20:,.1f} MiB the last time); the ledger takes "
            f"{ledger / 2**20:,.1f} MiB and the keys {self.keys.nbytes / 2**20:,.1f} MiB"
        )
        text += "." if memory is None else f", of {memory / 2**30:,.1f} GiB that this machine has."
        return text + (f" {self._excluded:,} samples were left out and counted." if self._excluded else "")

    # --- saved ---

    @property
    def seeks(self) -> bool:
        """True if the stream itself can be brought back to where it stood."""
        has = all(callable(getattr(self.stream, name, None)) for name in ("state_dict", "load_state_dict"))
        return has and not self._options.get("num_workers")

    def state_dict(self) -> dict[str, Any]:
        if self.goes_on and not self.seeks:
            self._voice.warn_once(
                "The stream cannot be brought back to where it stands (it has no state_dict, or worker processes read it): a "
                "resume reads it again from the beginning of its pass, which is exact if it gives the same samples again."
            )
        return {
            "passes": self.passes, "goes_on": self.goes_on, "read": self._read, "lengths": list(self._lengths),
            "before": self._before, "excluded": self._excluded,
            "keys": torch.from_numpy(self.keys.array()), "digest": self._digest(), "held": len(self.buffer),
        }  # fmt: skip

    def _digest(self) -> int:
        return zlib.crc32(self.buffer.rows.tobytes())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.keys.replace(Keys.from_array(state["keys"].numpy()))
        self.passes, self._lengths = int(state["passes"]), [int(length) for length in state["lengths"]]
        self._excluded, self.goes_on = int(state["excluded"]), bool(state["goes_on"])
        self._resuming = dict(state)
        self._samples, self._ahead, self._read = None, [], 0

    def resume(self, *, open_window: bool) -> None:
        """Bring the stream to where it stood when the state was saved, the buffer of the window in progress included."""
        state, self._resuming = self._resuming, None
        if state is None or not (open_window or state["goes_on"]):
            return
        before = self._before = dict(state["before"])
        fresh = self.stream.state_dict() if self.seeks else None
        for seeks in (True, False) if before["state"] is not None and self.seeks else (False,):
            self._lengths, self._excluded = list(before["lengths"]), int(before["excluded"])
            self.keys.replace(Keys.from_array(state["keys"].numpy()))
            if self.seeks and not seeks:
                self.stream.load_state_dict(fresh)  # its own state was not enough, as with a buffer that shuffles
            self._back_to(before, seeks=seeks)
            try:
                self._fill()
            except DataError:
                continue  # it ended before the window began
            if self._digest() == state["digest"] and self.goes_on == state["goes_on"]:
                return
        raise StateError(
            f"The stream gives other samples than before, or in another order: the {state['held']:,} samples of the window in "
            "progress did not come again, so it cannot be resumed exactly. Start anew with ledger=, which finds samples by key."
        )

    def _back_to(self, before: Mapping[str, Any], *, seeks: bool) -> None:
        """The stream as it stood before a window was read: by its own state, or by reading it again up to there."""
        self.goes_on = True
        if seeks:
            self.stream.load_state_dict(before["state"])
            self._samples, self._read, self._skipped, self._ahead = self._iterate(), int(before["read"]), 0, []
            return
        self._begin_pass()
        for _ in range(int(before["read"])):
            if self._next() is None:
                break


def _as_list(samples: list[Any]) -> list[Any]:
    """The collate function of the workers that read: samples stay what they are."""
    return samples
