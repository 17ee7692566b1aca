"""Hugging Face's Trainer (transformers 5) on a salience.Loader: `Trainer`, or `TrainerMixin` for a subclass of your own.

What is overridden, and why:

    get_train_dataloader         a Loader over `train_dataset`, with the collator and columns the Trainer would use
    _run_epoch                   the length of each epoch is that of its plan, and of a resumed one what is left of it
    get_batch_samples            ids ride inside each batch; items are counted over all micro-batches and ranks of a step
    compute_loss                 sum(w * l * items) * processes / items of the step: equal gradients however it is split
    create_scheduler             the same schedule, read at the run's progress instead of a number of steps
    set_initial_training_values  no more steps than there will be, and never fewer
    _save_rng_state, _init_training_state   the loader's state is in every checkpoint that can be resumed from
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR

from salience.errors import ConfigError, MissingExtra, StateError
from salience.files import atomic
from salience.frameworks.losses import OwnLosses, TaskLosses
from salience.frameworks.trainer_limits import check_arguments, check_version
from salience.loader import Loader
from salience.run.selection import Select
from salience.schedule import ProgressLR

try:
    import transformers
    from transformers.loss.loss_utils import ForCausalLMLoss
    from transformers.trainer_utils import seed_worker
except ImportError as cause:
    raise MissingExtra.of("transformers", "transformers", "salience.frameworks.transformers") from cause

_Trainer: Any = object
"""The Trainer that the mixin extends."""

IDS = "_ids"
STATE_FILE = "salience.pt"

check_version(transformers.Trainer, transformers.__version__)


class TrainerMixin(_Trainer):
    """Put before a Trainer class: `class Mine(TrainerMixin, transformers.Seq2SeqTrainer)`.

    `select` and `loader_options` (`log`, `ledger`, `sinks`, ...) are those of `salience.Loader`. `per_sample(outputs, inputs)`
    returns one loss per sample, [B], where the model's task is not among those known (`salience.frameworks.losses`).
    """

    loss_is_scaled_for_ga = True
    loader: Loader
    """The Loader of the last `train()`."""

    def __init__(
        self,
        *args: Any,
        select: Select = None,
        loader_options: Mapping[str, Any] | None = None,
        per_sample: OwnLosses | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._select, self._options, self._per_sample = select, dict(loader_options or {}), per_sample
        self.epoch = self.taken = self.epoch_length = 0
        """The epoch in progress, and how many of its batches were trained on, of how many."""
        check_arguments(self, select)
        self.add_callback(_Reporter(self))

    # --- batches ---

    def get_train_dataloader(self) -> Any:
        """A Loader; it is made anew for every `train()`."""
        args, data, collate = self.args, self.train_dataset, self.data_collator
        if data is None:
            raise ConfigError("train() needs a train_dataset.")
        if hasattr(data, "remove_columns"):  # of Hugging Face's datasets: the columns are not even read
            data = self._remove_unused_columns(data, description="Training")
        else:
            collate = self._get_collator_with_removed_columns(collate, description="Training")
        workers = args.dataloader_num_workers
        seeding = functools.partial(seed_worker, num_workers=workers, rank=args.process_index)  # the Trainer's own
        self.loader = Loader(
            data, self._train_batch_size, collate_fn=collate, select=self._select, with_ids=True,
            epochs=math.ceil(args.num_train_epochs) if args.max_steps <= 0 else None,
            seed=args.seed if args.data_seed is None else args.data_seed, drop_last=args.dataloader_drop_last,
            num_workers=workers, prefetch_factor=args.dataloader_prefetch_factor,
            persistent_workers=args.dataloader_persistent_workers, worker_init_fn=seeding,
            pin_memory=args.dataloader_pin_memory and torch.accelerator.is_available(),
            **{"generator": self._generators()} | self._options,
        )  # fmt: skip
        self.epoch = self.taken = 0
        shift = getattr(self.model, "loss_function", None) is ForCausalLMLoss
        self._losses = TaskLosses(
            self.model, shift=shift, smoothing=args.label_smoothing_factor, own=self._per_sample,
            counts_first=not getattr(self, "_loss_shifts_labels", True),
        )  # fmt: skip
        return self.loader

    def _generators(self) -> Any:
        """Where nothing is selected, what the Trainer's own loader draws from, so that its order and dropout stay the same."""
        args, self._order = self.args, None
        if self._select is not None:
            return None
        alone = args.world_size == 1
        if not self.accelerator.use_seedable_sampler:
            return "global" if alone else None
        seed = args.data_seed if args.data_seed is not None else torch.initial_seed() if alone else args.seed
        self._order = torch.Generator(), seed
        return "global" if alone else torch.Generator().manual_seed(seed), self._order[0]

    def _begin(self) -> None:
        """Take up the next epoch: with `select` to know its length, else where the Trainer would call iter()."""
        if self._order is not None:
            generator, seed = self._order
            generator.manual_seed(seed + self.loader.epoch)  # as Accelerate's SeedableRandomSampler
        self._batches = iter(self.loader)

    def _run_epoch(self, **given: Any) -> None:
        """One epoch of the plan, or what is left of it."""
        if self._select is not None:
            self._begin()
        length, self.epoch, done = len(self.loader), self.loader.epoch, self.taken
        updates = math.ceil((length - done) / self.args.gradient_accumulation_steps)
        if self._select is not None and self.epoch + 1 == self.loader.epochs:
            self.state.max_steps = self.state.global_step + updates
        self.epoch_length = length
        given.update(
            epoch=self.epoch, train_dataloader=self._count(), steps_in_epoch=length - done,
            num_update_steps_per_epoch=updates,
        )  # fmt: skip
        super()._run_epoch(**given)
        if self._batches.complete:
            next(self._batches, None)  # into its end, as a loop does that does not count
        self.taken = 0

    def _count(self) -> Iterator[dict[str, Any]]:
        if self._select is None:
            self._begin()
        for ids, batch in self._batches:
            if not isinstance(batch, Mapping):
                raise ConfigError(
                    f"The collator made a {type(batch).__name__}; Trainer and salience need a dictionary of tensors."
                )
            self.taken += 1
            yield {**batch, IDS: ids.numpy()}  # an array: tensors are moved to the device, and ids are needed here

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> tuple[list[Any], Any]:
        """The batches of one step, and the items in them over all ranks."""
        batches = list(itertools.islice(epoch_iterator, num_batches))
        items = sum(self._losses.count_items(batch.get("labels"), len(batch[IDS])) for batch in batches)
        total = torch.tensor(items, device=device)
        return batches, self.accelerator.gather(total).sum() if self.args.world_size > 1 else total

    # --- losses ---

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Record per-sample losses and return their weighted share of the step; evaluation is the Trainer's own."""
        if IDS not in inputs:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        ids, inputs = torch.from_numpy(inputs[IDS]), {name: inputs[name] for name in inputs if name != IDS}
        found, outputs = self._losses(model, inputs)
        loss = self.loader.loss(
            found.losses, found.logits, found.targets, ids, counts=found.counts, total=num_items_in_batch
        )
        return (loss, outputs) if return_outputs else loss

    # --- the schedule ---

    def set_initial_training_values(self, args: Any, dataloader: Any) -> Any:
        """The most steps there can be; with `select` the exact number is known in the last epoch."""
        *given, max_steps = super().set_initial_training_values(args, dataloader)
        if self._select is not None:
            steps, epochs, group = self.loader.total_steps, self.loader.epochs or 1, args.gradient_accumulation_steps
            full = epochs * math.ceil(self.loader.n / (self._train_batch_size * self.loader.world) / group)
            max_steps = full if steps is None else min(full, steps // group + epochs)
        return *given, max_steps

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """The schedule that `args` name; where samples are selected, over the run's progress."""
        given: Any = self.lr_scheduler
        schedule = super().create_scheduler(num_training_steps, optimizer)
        if given is None and self._select is not None and isinstance(schedule, LambdaLR):
            factor: Any = schedule.lr_lambdas[0]
            self.lr_scheduler = ProgressLR(
                schedule.optimizer, self.loader, lambda progress: float(factor(progress * num_training_steps))
            )
        return self.lr_scheduler

    # --- checkpoints ---

    def _save_rng_state(self, output_dir: str) -> None:
        """Called for every checkpoint that can be resumed from, on every rank, before it counts as complete."""
        super()._save_rng_state(output_dir)
        state = self.loader.state_dict()
        taken = self.taken if self.loader.epoch == self.epoch else 0
        if self.args.should_save:
            with atomic(Path(output_dir, STATE_FILE)) as file:
                torch.save({"loader": state, "taken": taken}, file)

    def _init_training_state(
        self, max_steps: Any, updates: Any, epochs: Any, resume_from_checkpoint: Any, trial: Any
    ) -> tuple[int, int]:
        found = super()._init_training_state(max_steps, updates, epochs, resume_from_checkpoint, trial)
        if resume_from_checkpoint is None:
            return found
        path = Path(resume_from_checkpoint, STATE_FILE)
        if not path.is_file():
            raise StateError(f"There is no {path}: that checkpoint is not of this Trainer; start without resuming.")
        saved = torch.load(path, weights_only=True)
        self.loader.load_state_dict(saved["loader"])
        self.taken = int(saved["taken"])
        return self.loader.epoch, 0  # the loader itself goes on where it was


class Trainer(TrainerMixin, transformers.Trainer):  # pyright: ignore[reportIncompatibleMethodOverride]
    """transformers.Trainer on a salience.Loader; `select`, `loader_options` and `per_sample` as in `TrainerMixin`."""


class _Reporter(transformers.TrainerCallback):
    """Reports evaluations to the loader, and says how far a resumed epoch has come."""

    def __init__(self, trainer: TrainerMixin) -> None:
        self._trainer = trainer

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        state.epoch = self._trainer.epoch + self._trainer.taken / self._trainer.epoch_length

    def on_evaluate(
        self, args: Any, state: Any, control: Any, metrics: Mapping[str, float] | None = None, **_: Any
    ) -> None:
        name = args.metric_for_best_model or "loss"
        value = (metrics or {}).get(name if name.startswith("eval_") else f"eval_{name}")
        if value is None or not self._trainer.is_in_train:
            return
        rises = args.greater_is_better if args.greater_is_better is not None else not name.endswith("loss")
        self._trainer.loader.evaluated(float(value) if rises else -float(value))
