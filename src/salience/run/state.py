"""A run as something to save, to go on with, and to tell about."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from salience.config import SelectConfig
from salience.errors import StateError
from salience.ledger import COLUMNS
from salience.plan import Plan
from salience.run.windows import Windows
from salience.select import preset
from salience.select.redundancy import CopySearch
from salience.select.reference import checksum
from salience.select.summary import summarise

STATE_VERSION = 1


class Run(Windows):
    """The state of one training run over `n` samples."""

    def summary(self) -> dict[str, Any]:
        """What the run taught us so far: per-class statistics, hardest and never-learnt samples, what could be saved."""
        self._flush()
        config = self._config if isinstance(self._config, SelectConfig) else preset("default")
        windows = self.epochs or max(10, self.epoch)
        return summarise(
            self._ledger, config, windows=windows, seed=self.seed, batch_size=self.batch_size * self.world,
            reference=self._opinion(), evaluations=self._evaluations,
            selected=(self.epoch, self._visited) if isinstance(self._config, SelectConfig) else None,
            studied=self._studied(),
        )  # fmt: skip

    def report(self) -> str:
        """The summary as text, also written to the event log, as are the findings behind it."""
        from salience.report.text import render

        self._flush()
        self._look_for_copies(last=True)
        self._emit_findings()
        return render(self.events.emit("observed", summary=self.summary())["summary"])

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to go on as if never stopped. With several ranks, every rank must call it."""
        self._flush()
        recent = self._recent.values
        if self._copies is not None and self._group is not None:
            self._group.all_max(self._copies.prints)
        return {
            "version": STATE_VERSION,
            "population": self.n,
            "world": self.world,
            "batch_size": self.batch_size,
            "seed": self.seed,
            "select": self._describe(),
            "reference": checksum(self._reference),
            "proxy": self._proxy_state if self._proxy is None else self._proxy.state_dict(),
            "background": self._scorer is not None,  # then what is learnt by a window's edge depends on timing
            "steering": None if self._steering is None else self._steering.state_dict(),
            "evaluations": [list(result) for result in self._evaluations],
            "copies": None if self._copies is None else _tensors(self._copies.state_dict()),
            "embeddings": None if self._copies is None else self._copies.given,
            "suspects": None
            if self._suspects is None
            else (self._suspects[0], torch.from_numpy(self._suspects[1].copy())),
            "epoch": self.epoch,
            "span": list(self._span),
            "left_out": self._left_out,
            "visited": self._visited,
            "visits_expected": self.visits_expected,
            "delivered": sorted(self._delivered),
            "plan": None if not self._open or self._shard is None else _tensors(self._shard.plan.arrays()),
            "ledger": _tensors(self._ledger.state_dict()),
            "shuffle": (self._generator.get_state() if not self._open else self._shuffle_state).clone(),
            "drew_worker_seed": self._drew_worker_seed,
            "started": self._started,
            "recent_losses": None if recent is None else recent.detach().cpu().clone(),
            "switched_off": sorted(self._pipeline.off) if self._pipeline else [],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict()` was taken: the next iteration delivers the rest of that window."""
        if state.get("version") != STATE_VERSION:
            raise StateError(
                f"This state has version {state.get('version')!r}; this salience reads version {STATE_VERSION}."
            )
        for key, mine, advice in (
            ("population", self.n, "resume with the data set it was made from"),
            ("world", self.world, "resume with as many ranks"),
            ("batch_size", self.batch_size, "resume with the same batch_size"),
            ("seed", self.seed, "resume with the same seed"),
            ("select", self._describe(), "resume with the same select"),
            ("reference", checksum(self._reference), "resume with the same reference= (these are checksums)"),
            (
                "embeddings",
                self._copies and self._copies.given,
                "resume with the same embeddings= (these are checksums)",
            ),
        ):
            if state.get(key) != mine:
                raise StateError(f"The state was saved with {key} {state.get(key)!r}, this run has {mine!r}; {advice}.")
        if self._group is None or self._group.leads_node:
            self._ledger.load_state_dict(_arrays(state["ledger"]))
        if self._group is not None:
            self._group.barrier()
        self.epoch = int(state["epoch"])
        self._visited, self.visits_expected = int(state["visited"]), state["visits_expected"]
        self._started = bool(state["started"])
        self._generator.set_state(state["shuffle"])
        self._recent.values = state["recent_losses"]
        if self._pipeline is not None:
            self._pipeline.off = set(state["switched_off"])
        if self._steering is not None:
            self._steering.load_state_dict(state["steering"])
        self._evaluations = [(float(progress), float(metric)) for progress, metric in state.get("evaluations", ())]
        self._left_out = float(state.get("left_out", 0.0))
        self._resume_proxy(state.get("proxy"))
        suspects = state.get("suspects")
        self._suspects = None if suspects is None else (int(suspects[0]), suspects[1].numpy())
        if self._copies is None and state.get("copies") is not None:
            self._copies = CopySearch(self.n)  # observed with features; they go on when the model is attached again
        if self._copies is not None and state.get("copies") is not None:
            self._copies.load_state_dict(_arrays(state["copies"]))
            if self._recorder.embeddings is not None:
                self._recorder.embeddings = self._copies.embeddings
        self._shard, self._open, self._delivered, self._resumed = None, False, set(), False
        if state["plan"] is not None:
            plan = Plan.from_arrays(_arrays(state["plan"]))
            if self._config is None:
                self._plain_order(bool(state["drew_worker_seed"]))  # bring the generator to where this window left it
            self._adopt(plan, set(state["delivered"]))
            self._resumed = True
        start, end = state["span"]
        self._span = (float(start), float(end))


def _tensors(arrays: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
    """Arrays as tensors that torch.load(weights_only=True) takes; unsigned ones travel under a signed type."""
    return {
        name: torch.from_numpy(np.array(a.view(f"i{a.itemsize}") if a.dtype.kind == "u" and a.itemsize > 1 else a))
        for name, a in arrays.items()
    }


def _arrays(tensors: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
    arrays: dict[str, np.ndarray] = {name: tensor.numpy() for name, tensor in tensors.items()}
    for name, array in arrays.items():
        dtype = np.dtype(COLUMNS[name].dtype) if name in COLUMNS else array.dtype
        if dtype != array.dtype:
            arrays[name] = array.view(dtype)
    return arrays
