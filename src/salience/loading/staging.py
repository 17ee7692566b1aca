"""A Loader with stages of augmentation: which samples get all of them fresh, and what each costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from salience.batches import Tagged
from salience.decide import Settings
from salience.errors import ConfigError, StateError
from salience.feed.reads import Counts
from salience.loading.reading import Reading
from salience.plan import Plan
from salience.select.ranks import rank_normalise
from salience.treat.config import Treat
from salience.treat.dataset import Made
from salience.treat.told import told
from salience.treat.treating import Treating


class Staging(Reading):
    """Stages between the data set and the batch."""

    _options: dict[str, Any]
    """Of the DataLoader inside."""
    _treating: Treating | None
    _treat: Treat | None
    """What `auto` may switch on, where the user left that open."""
    _settings: Settings
    """Of the window in progress, as far as `auto` may change them."""
    _refused: dict[str, str]
    """Levers that `auto` cannot try, and why."""

    def _treated(self, plan: Plan) -> Plan:
        if self._treating is None:
            return plan
        with self.watch("rehearsal"):
            said, counts = self._treating.begin(self._options)
        if self._treat is not None:  # nobody asked for it: whatever is said is a reason not to try it
            if said:
                self._refused['treat="reuse"'] = said[-1]
            self._treating.config = self._treat if self._settings.treat else replace(self._treat, kind="fresh")
            said = []
        for text in said:
            if self._strict:
                raise ConfigError(text)
            self._warn(text)
        if self._source is not None:
            self._source.stats.add(Counts(**counts))
        ranks: npt.NDArray[Any] | None = plan.ranks
        known = np.isfinite(self._ledger.mean_loss)
        if ranks is None and known.any():  # nothing is selected: then the loss says what is important
            ranks = np.full(self.n, 0.5, dtype=np.float32)
            ranks[known] = rank_normalise(self._ledger.mean_loss[known])
        return self._treating.plan(plan, ranks, self.copies)

    def _unread(self, plan: Plan) -> npt.NDArray[np.bool_] | None:
        return None if self._treating is None else self._treating.unread(plan)

    def _take_made(self, number: int, ids: npt.NDArray[np.int64], made: Made) -> Any:
        """The same of a batch that went through stages."""
        assert self._treating is not None
        assert self._shard is not None
        note = made.note
        if self._source is not None:
            self._source.stats.add(Counts(**note.counts))
        self._treating.take(ids, self._shard.plan.level[self._shard.span(number)], note)
        known = np.isfinite(note.cost_us)
        self._ledger.cost_us[ids[known]] = note.cost_us[known]
        self._take_broken(number, ids, note.broken)
        return made.batch

    def _work(self, tagged: Tagged) -> dict[str, float]:
        """Seconds the batch cost its worker, by stage."""
        if self._treating is None or not isinstance(tagged.batch, Made):
            return tagged.work
        seconds: list[float] = tagged.batch.note.seconds.tolist()
        return {**dict(zip(self._stage_names, seconds, strict=False)), "collate": tagged.work.get("collate", 0.0)}

    @property
    def _stage_names(self) -> tuple[str, ...]:
        stages = () if self._treating is None else self._treating.stages
        return "load" if self._source is None else "fetch", *(stage.label for stage in stages)

    def report(self) -> str:
        text = super().report()
        return text if self._treating is None else f"{text}\n\n{told(self._treating)}"

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        return state if self._treating is None else {**state, "treat": self._treating.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self._treating is not None:
            self._treating.load_state_dict(state.get("treat"))
        elif state.get("treat") is not None:
            raise StateError("The state was saved with stages and this Loader has none; resume with the same augment=.")
        super().load_state_dict(state)
