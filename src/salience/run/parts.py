"""The parts that every run has, made from what a user passes to a front door."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy.typing as npt

from salience._version import __version__
from salience.config import SelectConfig
from salience.errors import ConfigError
from salience.events import EventLog
from salience.large.growth import Growth
from salience.ledger import Ledger
from salience.ledger.copies import Copies
from salience.ledger.keys import Keys
from salience.ledger.sharing import Board
from salience.plan import Trace
from salience.ranks import current_ranks
from salience.report.sinks import Sink
from salience.run.balancing import Balancing
from salience.run.bylength import ByLength, check_options, mean_samples
from salience.run.copying import Copying
from salience.run.grading import Quality
from salience.run.lengths import Lengths
from salience.run.order import Generators, PlainOrder
from salience.run.part import Setup, Voice, parse_count
from salience.run.planning import Planning
from salience.run.probing import Probing
from salience.run.recording import Recording
from salience.run.selection import Select
from salience.run.sensing import Sensing
from salience.run.sharing import Sharing
from salience.run.watching import TimingWaits, Watching, open_sinks
from salience.select.presets import PRESETS
from salience.select.reference import Opinion, reference_of
from salience.select.steering import Paths


class Parts:
    """The parts that every run has, made from what a user passes."""

    def __init__(
        self,
        n: int,
        *,
        batch_size: int,
        epochs: int | None,
        steps: int | None = None,
        select: Select,
        seed: int,
        drop_last: bool,
        window: int | str | None,
        generator: Generators,
        shuffle: bool = True,
        even: bool = False,
        ledger: Ledger | Board | str | Path | None,
        reference: Opinion | Sequence[Opinion] | None,
        baseline: Paths | None,
        embeddings: npt.ArrayLike | None,
        trace: str | Path | None,
        log: EventLog | str | Path | None,
        sinks: Sequence[str | Sink],
        strict: bool,
        balance: bool = False,
        costs: npt.ArrayLike | None = None,
        lengths: Lengths | None = None,
        batch_tokens: int | None = None,
        keys: Keys | None = None,
        stream: bool = False,
        quality: Quality | None = None,
        copies: Copies | None = None,
        grow: Growth | None = None,
        alike: Mapping[str, Any] | None = None,
    ) -> None:
        """`alike` are more settings that must be the same on all ranks."""
        self.setup = Setup(
            n=n, batch_size=batch_size, epochs=epochs, steps=steps, seed=seed, drop_last=drop_last,
            ranks=current_ranks(), window=None if window is None else parse_count(window), stream=stream,
            mean_batch=None if lengths is None or batch_tokens is None else mean_samples(lengths, batch_tokens),
        )  # fmt: skip
        events = log if isinstance(log, EventLog) else EventLog(log if self.setup.rank == 0 else None)
        self.voice = Voice(events, strict=strict)
        self.trace = None if trace is None else Trace(trace)
        open_sinks(self.setup, self.voice, sinks)
        self.watching = Watching()
        self.waits = TimingWaits(self.setup, self.watching.steps)
        board = ledger if isinstance(ledger, Board) else None
        if board is not None and self.setup.ranks is not None:
            raise ConfigError(
                "A shared ledger is for jobs of one process each, and this one has several ranks, which share theirs already: "
                "leave out ledger=, or give it the ledger of another run."
            )
        if board is not None and stream:
            raise ConfigError(
                "A shared ledger knows samples by their positions, and a stream has none: leave out ledger=."
            )
        known = None if board is None else board.begin()
        start = ledger if known is None else known.ledger
        self.planning = Planning(
            self.setup, select, self.voice, baseline=baseline, even=even, quality=quality, grow=grow,
            knows=known is not None and start is not None, order=PlainOrder(n, generator, seed=seed, shuffle=shuffle),
        )  # fmt: skip
        self._check_alike(
            balance=balance, costs=costs is not None, batch_tokens=batch_tokens, grow=grow and grow.described, **(alike or {}),
        )  # fmt: skip
        self.by_length = None
        if lengths is not None and batch_tokens is not None:
            check_options(self.planning, even=even, drop_last=drop_last, divides=balance or costs is not None)
            self.by_length = ByLength(self.setup, self.voice, lengths, batch_tokens)
        self.recording = Recording(self.setup, self.voice, start, keys)
        self.sharing: Sharing | None = None
        """This job's end of a ledger that several jobs share."""
        if board is not None and known is not None:
            self.sharing = Sharing(self.voice, board, known, self.recording.ledger)
        self.copying = Copying(self.setup, self.voice, None if stream else self.planning.pipeline, embeddings, copies)
        given = None if reference is None else reference_of(reference, n)
        if given is not None and self.planning.config == PRESETS["fine_pruning"]:
            self.voice.warn(
                "'fine_pruning' is now the published rule and asks no reference; the rule of that name before is "
                "'coarse_to_fine'."
            )
        self.balancing = None
        if balance or costs is not None:
            self.balancing = Balancing(self.setup, self.voice, self.watching.steps, costs, by_speed=balance)
        self.sensing = Sensing(self.setup, self.voice, self.recording.recorder, given)
        self.probing = Probing(self.setup, self.voice)

    def _check_alike(self, **more: Any) -> None:
        """Several ranks: stop all of them, by name, where their settings differ."""
        setup = self.setup
        if setup.ranks is None:
            return
        config = self.planning.config
        setup.ranks.check_alike({
            "the version of salience": __version__, "the size of the data set": setup.n, "batch_size": setup.batch_size,
            "epochs": setup.epochs, "steps": setup.steps, "seed": setup.seed, "drop_last": setup.drop_last,
            "window": setup.window,
            "select": str(config.to_dict()) if isinstance(config, SelectConfig) else self.planning.described, **more,
        })  # fmt: skip
