"""Near-copies among the samples: searched for at window edges, if a plug-in or the report needs them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from salience.errors import ConfigError
from salience.ledger import Ledger
from salience.ledger.copies import Copies
from salience.ledger.embeddings import Embeddings
from salience.run.part import Batch, Part, Setup, Voice
from salience.run.state import arrays, tensors
from salience.select import Pipeline
from salience.select.redundancy import SEARCH_OPTIONS, CopySearch
from salience.signals.features import FEATURE_WIDTH


class Copying(Part):
    """The search for copies, on rank 0, and what it found, on every rank."""

    name = "copying"

    def __init__(
        self,
        setup: Setup,
        voice: Voice,
        pipeline: Pipeline | None,
        embeddings: npt.ArrayLike | None = None,
        known: Copies | None = None,
    ) -> None:
        """`known` are copies that the user found before the run."""
        if known is not None and len(known.group) != setup.n:
            raise ConfigError(f"copies= is about {len(known.group)} samples, and the data set has {setup.n}.")
        self._setup, self._voice, self._pipeline, self.known = setup, voice, pipeline, known
        self.given = embeddings is not None
        """True if the user gave embeddings, one per sample."""
        self.search = self._make(pipeline, embeddings)
        """None if no plug-in needs copies and none are wanted for the report."""

    def _make(self, pipeline: Pipeline | None, embeddings: npt.ArrayLike | None) -> CopySearch | None:
        uses = [] if pipeline is None else [p for p in pipeline.plugins if "copies" in p.card.needs]
        if not uses and embeddings is None and self.known is None:
            return None
        if not uses and pipeline is not None:
            raise ConfigError(
                "embeddings= and copies= are for plug-ins that need copies; select has none, add the filter 'redundancy'."
            )
        options = {name: uses[0].options[name] for name in SEARCH_OPTIONS if uses and name in uses[0].options}
        return CopySearch(self._setup.n, given=embeddings, known=self.known, **options)

    @property
    def in_use(self) -> bool:
        return self.search is not None

    def grow(self) -> None:
        """The data set has grown: begin the search anew."""
        if self.search is not None:
            self.search = self._make(self._pipeline, None) or CopySearch(self._setup.n)

    def offer(self, pipeline: Pipeline) -> None:
        """Prepare for a selection that may be switched on: it may need copies."""
        self.search = self.search or self._make(pipeline, None)

    def want_features(self, *, observing: bool) -> Embeddings | None:
        """A model was attached: where its features go on this rank; None = nowhere."""
        if self._setup.stream:
            return None
        if observing and self.search is None:
            self.search = CopySearch(self._setup.n)  # near-copies are found for the report
        if self.search is None or self._setup.rank > 0:
            return None
        self.search.embeddings = self.search.embeddings or Embeddings(self._setup.n, FEATURE_WIDTH)
        return self.search.embeddings if self.search.given is None else None

    @property
    def found(self) -> Copies | None:
        """Which samples are copies of each other, as far as they were looked for."""
        return None if self.search is None else self.search.found

    @property
    def embeddings(self) -> Embeddings | None:
        """Features of the samples, as far as the attached model gave any."""
        return None if self.search is None else self.search.embeddings

    def enter_index(self, fingerprints: npt.NDArray[np.int64]) -> None:
        """Take the fingerprints of all samples' bytes, which an index has before anything is read."""
        if self.search is not None:
            self.search.prints[:] = fingerprints

    def hand_over(self, batch: Batch) -> None:
        batch.features = self.search is not None and self.search.wants(batch.window)
        if batch.prints is not None and self.search is not None:
            known = batch.prints != 0  # a reused sample was not read again and keeps its fingerprint
            self.search.prints[batch.planned_ids[known]] = batch.prints[known] & np.iinfo(np.int64).max

    def on_loss(self, batch: Batch, losses: Tensor, kept: Tensor | None, targets: Tensor | None) -> None:
        if self.search is not None:
            self.search.begin()  # by now workers have been forked, and a thread may start

    def prepare(self, window: int, ledger: Ledger) -> None:
        self.look(ledger, window)

    def look(self, ledger: Ledger, window: int, *, last: bool = False) -> None:
        """Take the result of the last search, and prepare the next if it is due; `last` = the run is over.

        Rank 0 searches, and the other ranks get what it found.
        """
        if self.search is not None:
            with self._voice.watch("copies"):
                self._look(self.search, ledger, window, last)

    def _look(self, search: CopySearch, ledger: Ledger, window: int, last: bool) -> None:
        ranks = self._setup.ranks
        self._agree_on_prints()
        changed = self._setup.rank == 0 and search.look(ledger.label, last=last)
        if ranks is not None and (changed := bool(ranks.broadcast([float(changed)])[0])):
            n = self._setup.n
            found = search.found or Copies(group=np.empty(n, dtype=np.int32), similarity=np.empty(n, dtype=np.float32))
            ranks.broadcast_array(found.group)
            ranks.broadcast_array(found.similarity)
            search.found = found
        if changed and search.found is not None:
            members = search.found.group
            self._voice.events.emit(
                "copies", window=window, samples=int((members >= 0).sum()), groups=len(np.unique(members[members >= 0]))
            )

    def _agree_on_prints(self) -> None:
        if self.search is not None and self._setup.ranks is not None:
            self._setup.ranks.all_max(self.search.prints)

    def state_dict(self) -> dict[str, Any]:
        self._agree_on_prints()
        return {"search": None if self.search is None else tensors(self.search.state_dict())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state["search"] is None:
            return
        if self.search is None:
            # The saved run observed with features, which continue when the model is attached again.
            self.search = CopySearch(self._setup.n)
        self.search.load_state_dict(arrays(state["search"]))
