"""What does each adapter cost, and does it train the same?

Question: a Loader that observes under Lightning, Hugging Face's Trainer and Accelerate, against the framework's own loop over a
`DataLoader` with the same data, model and batch size. Seconds are processor seconds of whole runs (one thread,
no workers: all the work is in them, and other jobs of the machine are not), interleaved; ratios are medians over pairs of runs.
Bars: ratio at most 1.02; every sample visited exactly once per epoch; accuracy within the spread that another order of the same
samples makes. Against us: models so small that a step takes milliseconds make any constant cost large.

    python benchmarks/frameworks.py --quick     # about a minute; the last line is one JSON object
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import lightning as L
import torch
import torch.nn.functional as F
import transformers
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset
from transformers import BertConfig, BertForSequenceClassification, TrainingArguments

import salience
from salience.frameworks.lightning import Salience
from salience.frameworks.transformers import Trainer

WIDTH, CLASSES, BATCH = 256, 10, 64


def table(n: int) -> TensorDataset:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(n, WIDTH, generator=g)
    return TensorDataset(x, (x @ torch.randn(WIDTH, CLASSES, generator=g)).argmax(1))


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 768), nn.ReLU(), nn.Linear(768, 768), nn.ReLU(), nn.Linear(768, CLASSES))


def accuracy(model: nn.Module, data: TensorDataset) -> float:
    x, y = data.tensors
    with torch.no_grad():
        return float((model(x).argmax(1) == y).float().mean())


Result = tuple[float, float, list[int]]
"""Processor seconds, accuracy, and how often each sample was visited (empty for the framework's own loop)."""


class Module(L.LightningModule):
    def __init__(self, ours: bool) -> None:
        super().__init__()
        self.net, self.ours = net(), ours

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        x, y = batch
        logits = self.net(x)
        if self.ours:
            return self.salience.loss(F.cross_entropy(logits, y, reduction="none"), logits, y)
        return F.cross_entropy(logits, y)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def under_lightning(ours: bool, epochs: int, n: int) -> Result:
    data, callback, module = table(n), Salience(), Module(ours)
    trainer = L.Trainer(
        max_epochs=epochs, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[callback] if ours else [],
    )  # fmt: skip
    begin = time.process_time()
    trainer.fit(module, DataLoader(data, BATCH, shuffle=True, generator=torch.Generator().manual_seed(0)))
    seconds = time.process_time() - begin
    return seconds, accuracy(module.net, data), callback.loader.ledger.seen.tolist() if ours else []


def under_accelerate(ours: bool, epochs: int, n: int) -> Result:
    data, model, accelerator = table(n), net(), Accelerator(cpu=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(0)
    loader: Any = salience.Loader(data, BATCH) if ours else DataLoader(data, BATCH, shuffle=True, generator=generator)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    begin = time.process_time()
    for _ in range(epochs):
        for x, y in loader:
            logits = model(x)
            losses = F.cross_entropy(logits, y, reduction="none" if ours else "mean")
            accelerator.backward(loader.loss(losses, logits, y) if ours else losses)
            optimizer.step()
            optimizer.zero_grad()
    seconds = time.process_time() - begin
    return seconds, accuracy(model, data), loader.ledger.seen.tolist() if ours else []


class Texts(Dataset[dict[str, Any]]):
    def __init__(self, n: int) -> None:
        self.words = torch.randint(1, 50, (n, 24), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": self.words[index], "labels": self.words[index, 0] % 2}


def under_transformers(ours: bool, epochs: int, n: int) -> Result:
    torch.manual_seed(0)
    size = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 256}
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model, data = BertForSequenceClassification(BertConfig(vocab_size=50, num_labels=2, **size, **still)), Texts(n // 8)
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder, num_train_epochs=epochs, per_device_train_batch_size=32, learning_rate=1e-3, use_cpu=True, report_to=[],
            disable_tqdm=True, save_strategy="no", logging_strategy="no", dataloader_pin_memory=False,
        )  # fmt: skip
        trainer = (Trainer if ours else transformers.Trainer)(model, args, train_dataset=data)
        trainer.log = lambda *_, **__: None
        begin = time.process_time()
        trainer.train()
        seconds = time.process_time() - begin
    model.eval()
    with torch.no_grad():
        right = float((model(data.words).logits.argmax(1) == data.words[:, 0] % 2).float().mean())
    return seconds, right, trainer.loader.ledger.seen.tolist() if ours else []


def compare(run: Callable[[bool, int, int], Result], epochs: int, n: int, rounds: int) -> dict[str, Any]:
    run(True, 1, n // 4)  # warm up both
    run(False, 1, n // 4)
    ratios, ours, theirs = [], (0.0, 0.0, [0]), (0.0, 0.0, [0])
    for number in range(rounds):
        for mine in (True, False) if number % 2 else (False, True):
            result = run(mine, epochs, n)
            if mine:
                ours = result
            else:
                theirs = result
        ratios.append(ours[0] / theirs[0])
    return {
        "ratio": round(statistics.median(ratios), 4), "ratios": [round(ratio, 4) for ratio in ratios],
        "visits_exact": set(ours[2]) == {epochs}, "accuracy": round(ours[1], 4), "accuracy_own_loop": round(theirs[1], 4),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer and shorter runs")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    transformers.utils.logging.set_verbosity_error()
    epochs, n, rounds = (2, 4000, 5) if quick else (4, 16000, 11)
    found = {}
    for name, run in (
        ("lightning", under_lightning),
        ("accelerate", under_accelerate),
        ("transformers", under_transformers),
    ):
        found[name] = compare(run, epochs, n, rounds)
        print(f"{name:14} {found[name]}")
    print(json.dumps({**{f"{name}_ratio": one["ratio"] for name, one in found.items()}, "runs": found}))


if __name__ == "__main__":
    main()
