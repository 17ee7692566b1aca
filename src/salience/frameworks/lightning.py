"""Lightning (2.6) on a salience.Loader: the callback `Salience`, and `DataMixin` for a data module of your own.

Salience.setup           the training DataLoader becomes a Loader, before optimizers are made; the module gets `salience`.
                         Lightning iterates its `Batches`: one plan per epoch however often it calls iter()
Salience.loss            loss of the module's training_step; a short last group of accumulated batches weighs what it has
Salience.state_dict      the loader's state is in every checkpoint, of epoch ends too
on_validation_end        the monitored metric is reported to the loader
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from salience.errors import ConfigError, MissingExtra
from salience.frameworks.dataloaders import Batches, as_loader
from salience.loader import Loader
from salience.schedule import ProgressLR

try:
    import lightning
    from lightning.pytorch.utilities import rank_zero_warn
except ImportError as cause:
    raise MissingExtra.of("lightning", "lightning", "salience.frameworks.lightning") from cause

STEP_HOOKS = (
    "on_train_batch_start", "on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step",
    "on_train_batch_end",
)  # fmt: skip
"""Hooks that Lightning calls in every step; those of them that do nothing take about 50 microseconds together."""


class Salience(lightning.Callback):
    """Has `Trainer.fit` train on a Loader; in the module's `training_step`, return `self.salience.loss(losses, logits, y)`.

    `options` are those of `salience.Loader` (`select`, `log`, `seed`, ...). `monitor` names a validation metric that is
    reported to the loader; `mode` is "max" or "min", as in ModelCheckpoint.
    """

    def __init__(self, *, monitor: str | None = None, mode: str = "max", **options: Any) -> None:
        if mode not in ("max", "min"):
            raise ConfigError(f'mode is {mode!r}; it must be "max" or "min".')
        self.monitor, self.sign, self.options = monitor, 1 if mode == "max" else -1, options
        self._trainer: Any = None
        self._batches: Batches | None = None

    @property
    def loader(self) -> Loader:
        """The Loader; there is one from `setup` on, so that `configure_optimizers` can use it."""
        if self._batches is None:
            raise ConfigError("There is no loader before trainer.fit() has called setup().")
        return self._batches.loader

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if stage != "fit":
            return
        source, options = trainer.fit_loop._data_source, dict(self.options)
        given = source.dataloader()
        if not isinstance(given, Loader):
            options |= {} if "epochs" in options else self._length(trainer)
        self._trainer, self._batches = trainer, Batches(as_loader(given, **options), self._on_no_loss)
        trainer.fit_loop._data_source = type(source)(self._batches, "")
        if self._batches.varies or options.get("auto"):
            trainer.reload_dataloaders_every_n_epochs = 1  # so that the length of each epoch is asked for
        pl_module.salience = self
        for hook in STEP_HOOKS:
            if getattr(type(self), hook) is getattr(lightning.Callback, hook):
                setattr(self, hook, None)  # what cannot be called, Lightning passes over

    def _length(self, trainer: Any) -> dict[str, Any]:
        """How long the run is, as options of a Loader; to observe, nobody needs to know."""
        epochs, steps = trainer.max_epochs, trainer.max_steps
        if epochs is not None and epochs > 0 and steps == -1:
            return {"epochs": epochs}
        if self.options.get("select") is None:
            return {}
        if steps < 1 or epochs != -1 or trainer.accumulate_grad_batches > 1:
            raise ConfigError(
                f"select paces itself over the run; max_epochs is {epochs}, max_steps {steps} and accumulate_grad_batches "
                f"{trainer.accumulate_grad_batches}: set max_epochs alone, or max_steps alone without accumulation."
            )
        return {"steps": steps}

    # --- in the module ---

    def loss(self, losses: Tensor, logits: Tensor | None = None, targets: Tensor | None = None, **more: Any) -> Tensor:
        """`loader.loss` of the batch in `training_step`, times what Lightning will divide it by where it accumulates."""
        group, loader, trainer = self._trainer.accumulate_grad_batches, self.loader, self._trainer
        if group == 1 or not trainer.lightning_module.automatic_optimization:
            return loader.loss(losses, logits, targets, **more)
        first = trainer.fit_loop.epoch_loop.batch_idx // group * group
        size, end = loader.batch_size * loader.world, min(first + group, trainer.num_training_batches)
        plan = loader.plan
        whole = plan is not None and len(plan) > (len(loader) - 1) * size  # planned at once
        total = min(end * size, len(plan) if whole and plan is not None else loader.n) - first * size
        return loader.loss(losses, logits, targets, total=total, **more) * group

    def schedule(self, optimizer: torch.optim.Optimizer, shape: Any = "one_cycle") -> dict[str, Any]:
        """A ProgressLR as `configure_optimizers` returns it: one step after each optimizer step."""
        return {"scheduler": ProgressLR(optimizer, self.loader, shape), "interval": "step"}

    # --- Lightning's hooks ---

    def _on_no_loss(self) -> None:
        """Say early that nothing is recorded, since a selecting run would stop at the end of its first epoch."""
        module = type(self._trainer.lightning_module).__name__
        text = f"{module}.training_step has recorded no loss: return self.salience.loss(losses, logits, y)."
        if self.options.get("select") is not None:
            raise ConfigError(text)
        rank_zero_warn(f"salience: {text}")

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if self.monitor is None or trainer.sanity_checking or self._batches is None:
            return
        if self.monitor not in trainer.callback_metrics:
            raise ConfigError(f"monitor is {self.monitor!r}; validation logged {sorted(trainer.callback_metrics)}.")
        self.loader.evaluated(self.sign * float(trainer.callback_metrics[self.monitor]))

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if self._batches is not None:
            self._batches.end_epoch()

    def state_dict(self) -> dict[str, Any]:
        return {} if self._batches is None else {"loader": self.loader.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if state_dict and self._batches is not None:
            self.loader.load_state_dict(state_dict["loader"])


class DataMixin:
    """Put before a data module, `class Mine(DataMixin, MyData)`: its training DataLoader becomes a Loader with the options
    in `salience`, a dictionary."""

    salience: ClassVar[Mapping[str, Any]] = {}

    def train_dataloader(self) -> Loader:
        return as_loader(super().train_dataloader(), **self.salience)  # pyright: ignore
