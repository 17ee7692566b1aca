"""Lightning (2.6) on a salience.Loader: the callback `Salience`, and `DataMixin` for a data module of your own.

Salience.setup           the training DataLoader becomes a Loader, before optimizers are made; the module gets `salience`
Batches                  what Lightning iterates: one plan per epoch however often it calls iter(), with its exact length
Salience.loss            loss of the module's training_step; a short last group of accumulated batches weighs what it has
Salience.state_dict      the loader's state is in every checkpoint, of epoch ends too
on_validation_end        the monitored metric is reported to the loader
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler

from salience.errors import ConfigError, MissingExtra
from salience.loader import Loader
from salience.ranks import current_ranks
from salience.run.iterating import BatchIterator
from salience.schedule import ProgressLR

try:
    import lightning
    from lightning.pytorch.utilities import rank_zero_warn
except ImportError as cause:
    raise MissingExtra.of("lightning", "lightning", "salience.frameworks.lightning") from cause

PASSED = (
    "batch_size", "collate_fn", "drop_last", "generator", "num_workers", "pin_memory", "timeout", "worker_init_fn",
    "multiprocessing_context", "prefetch_factor", "persistent_workers",
)  # fmt: skip
"""What a Loader takes over from a DataLoader."""


LOSSLESS = 8
"""At the batch of this number a training_step that has recorded no loss is told that it returns another one."""
STEP_HOOKS = (
    "on_train_batch_start", "on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step",
    "on_train_batch_end",
)  # fmt: skip
"""Hooks that Lightning calls in every step; those of them that do nothing take about 50 microseconds together."""


def as_loader(loader: Any, **options: Any) -> Loader:
    """A Loader over the data set of a DataLoader, with its arguments; a Loader is returned as it is.

    Where nothing is selected, the order stays that of the DataLoader: its generators, of several processes those it was
    given, or the order of the data set.
    """
    if isinstance(loader, Loader):
        if options:
            raise ConfigError(
                f"{sorted(options)} belong to the salience.Loader that train_dataloader() returns; say it there."
            )
        return loader
    if not isinstance(loader, DataLoader):
        raise ConfigError(
            f"train_dataloader() returns a {type(loader).__name__}; return a DataLoader or a salience.Loader."
        )
    sampler, observes = loader.sampler, options.get("select") is None
    in_order = isinstance(sampler, SequentialSampler)
    shuffles = isinstance(sampler, RandomSampler) and (
        not sampler.replacement and sampler.num_samples == len(sampler.data_source)
    )
    if not (shuffles or (in_order and observes)) or loader.batch_size is None:
        own = "does not shuffle" if in_order else "draws its own samples"
        raise ConfigError(
            f"The training DataLoader {own} ({type(sampler).__name__}), and the plan sets the order: use shuffle=True, "
            "or salience.Observer to record only."
        )
    if observes and "seed" not in options:
        options.setdefault("generator", generators_of(loader))
    options.setdefault("shuffle", not in_order)
    return Loader(loader.dataset, **{name: getattr(loader, name) for name in PASSED} | options)


def generators_of(loader: DataLoader[Any]) -> Any:
    """What the DataLoader draws from, as `generator` of a Loader: several processes draw alike, so not from their own."""
    if current_ranks() is not None:
        return loader.generator
    first, second = loader.generator or "global", getattr(loader.sampler, "generator", None)
    return first if second is None or second is first else (first, second)


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
        source, epochs, options = trainer.fit_loop._data_source, trainer.max_epochs, dict(self.options)
        given = source.dataloader()
        if not isinstance(given, Loader):
            counted = trainer.max_steps == -1 and epochs is not None and epochs > 0
            if options.get("select") is not None and not counted:
                raise ConfigError(
                    f"select paces itself over epochs; max_epochs is {epochs} and max_steps {trainer.max_steps}: set "
                    "max_epochs alone."
                )
            options.setdefault("epochs", epochs if counted else None)
        self._trainer, self._batches = trainer, Batches(as_loader(given, **options), self._on_no_loss)
        trainer.fit_loop._data_source = type(source)(self._batches, "")
        if self._batches.varies or options.get("auto"):
            trainer.reload_dataloaders_every_n_epochs = 1  # so that the length of each epoch is asked for
        pl_module.salience = self
        for hook in STEP_HOOKS:
            if getattr(type(self), hook) is getattr(lightning.Callback, hook):
                setattr(self, hook, None)  # what cannot be called, Lightning passes over

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


class Batches:
    """A Loader for a loop that calls iter() and len() whenever it likes: until a batch is taken, all share one iterator."""

    def __init__(self, loader: Loader, on_no_loss: Callable[[], None]) -> None:
        self.loader, self._on_no_loss = loader, on_no_loss
        self.varies = loader.epochs is not None and loader.total_steps != loader.epochs * len(loader)
        """True if epochs may differ in length."""
        self.in_epoch = False
        """True from the first batch of an epoch to its end; an iter() in between is a peek, as with a Loader."""
        self._now: BatchIterator | None = None
        self._taken = False

    def __iter__(self) -> Iterator[Any]:
        if self._taken and self.in_epoch:
            return iter(self.loader)
        self._open()
        return self._take()

    def __len__(self) -> int:
        if self.varies and not self.in_epoch and self.loader.epoch < (self.loader.epochs or 0):
            self._open()  # planned, and so exact
        return len(self.loader)

    def _open(self) -> None:
        if self._taken:
            self._now, self._taken = None, False  # let go of it, or the next one would be a peek
        if self._now is None:
            self._now = iter(self.loader)

    def _take(self) -> Iterator[Any]:
        while self._now is not None:
            self._taken = self.in_epoch = True
            try:
                batch = next(self._now)
            except StopIteration:
                return
            if self.loader.steps.count == LOSSLESS and not self.loader.steps.losses:
                self._on_no_loss()
            yield batch

    def end_epoch(self) -> None:
        """Exhaust the iterator as other loops do: Lightning counts batches and stops before the end."""
        self.in_epoch = False
        if self._now is not None and self._taken and self._now.complete:
            next(self._now, None)

    def state_dict(self) -> dict[str, Any]:
        """Nothing: the callback saves the loader. Having it tells Lightning that this can be resumed inside an epoch."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Do nothing: the callback has loaded it already."""
