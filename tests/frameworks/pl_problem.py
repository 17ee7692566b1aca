"""A small module and data for the tests of Lightning; run as a script it is one rank of two."""

from __future__ import annotations

import sys
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from salience.frameworks.lightning import Salience

N = 64


def data(n: int = N) -> TensorDataset:
    g = torch.Generator().manual_seed(3)
    x = torch.randn(n, 8, generator=g)
    return TensorDataset(x, (x @ torch.randn(8, 4, generator=g)).argmax(1))


class Module(L.LightningModule):
    """Linear, on a schedule that follows the run's progress."""

    salience: Salience

    def __init__(self, shape: Any = "linear") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.shape = shape
        self.model = nn.Linear(8, 4)
        self.rates: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        logits = self.model(x)
        return self.salience.loss(F.cross_entropy(logits, y, reduction="none"), logits, y)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val_acc", (self.model(x).argmax(1) == y).float().mean())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.2)
        return {"optimizer": optimizer, "lr_scheduler": self.salience.schedule(optimizer, self.shape)}

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.rates.append(optimizer.param_groups[0]["lr"])


def fit(
    epochs: int,
    batch_size: int,
    *,
    options: dict[str, Any] | None = None,
    resume: Any = None,
    train: Any = None,
    shape: Any = "linear",
    **trainer: Any,
):
    module, callback = Module(shape), Salience(**(options or {}))
    given: dict[str, Any] = {
        "accelerator": "cpu", "devices": 1, "logger": False, "enable_progress_bar": False, "enable_model_summary": False,
        "enable_checkpointing": False, "max_epochs": epochs, "num_sanity_val_steps": 0,
    }  # fmt: skip
    callbacks = [callback, *trainer.pop("callbacks", [])]
    run = L.Trainer(**{**given, **trainer}, callbacks=callbacks)
    train = DataLoader(data(), batch_size, shuffle=True) if train is None else train
    run.fit(module, train, DataLoader(data(32), 16), ckpt_path=resume)
    return run, module, callback


if __name__ == "__main__":
    out, *cases = sys.argv[1:]
    for case in cases:
        group, select = case.split(":")
        run, module, callback = fit(
            5, 8 // int(group), options={"select": select or None}, devices=2, strategy="ddp",
            accumulate_grad_batches=int(group), use_distributed_sampler=True,
        )  # fmt: skip
        found = {
            "parameters": module.model.weight.detach().clone(),
            "steps": run.global_step,
            "loader": callback.loader.state_dict(),
        }
        torch.save(found, f"{out}/{case}:{run.global_rank}.pt")
