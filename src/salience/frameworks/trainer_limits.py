"""What the adapter for Hugging Face's Trainer refuses, each with one sentence, since it would be ignored or wrong."""

from __future__ import annotations

from typing import Any

from salience.errors import ConfigError
from salience.run.selection import Select

OVERRIDDEN = (
    "_run_epoch", "_init_training_state", "_save_rng_state", "get_batch_samples", "set_initial_training_values",
)  # fmt: skip
"""Methods of version 5 that others do not have."""


def check_version(trainer: type, version: str) -> None:
    """Refuse a version of transformers whose Trainer lacks what the adapter overrides."""
    for name in OVERRIDDEN:
        if not hasattr(trainer, name):
            raise ConfigError(
                f"transformers {version} has no Trainer.{name}, on which this adapter stands; it was made for transformers 5: "
                "install that, or use salience.Loader in a loop of your own."
            )


def check_arguments(trainer: Any, select: Select) -> None:
    """Refuse what would be silently ignored or wrong."""
    args = trainer.args
    if trainer.compute_loss_func is not None:
        raise ConfigError("compute_loss_func returns one number; pass per_sample=, which returns one loss per sample.")
    if args.train_sampling_strategy != "random":
        raise ConfigError(
            f"train_sampling_strategy is {args.train_sampling_strategy!r}; the plan sets the order: leave it at 'random'."
        )
    if args.n_gpu > 1:
        raise ConfigError(
            "Several GPUs in one process (DataParallel) are not supported; start one per GPU with torchrun."
        )
    if select is not None and (args.max_steps > 0 or args.num_train_epochs != int(args.num_train_epochs)):
        raise ConfigError(
            f"select paces itself over whole epochs; max_steps is {args.max_steps} and num_train_epochs is "
            f"{args.num_train_epochs}: set num_train_epochs to an integer and leave max_steps out."
        )
