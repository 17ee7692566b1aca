"""What does each adapter cost, and does it train the same?

Question: a Loader that observes under Lightning, Hugging Face's Trainer and Accelerate, against the framework's own loop over a
`DataLoader` with the same data, model and batch size. Both loops run at the same time, in two threads that take a step each
by turns, so that what disturbs the machine disturbs both alike; seconds are processor seconds of a thread (no workers: all
the work is in them). The ratio is that of an epoch, what is done between epochs included; of the epochs, the median and its
95% interval. Bars: ratio at most 1.02; every sample visited exactly once per epoch; accuracy equal to that of the framework's
own loop with the same seed. Against us: models so small that a step takes milliseconds make any constant cost large.

    python benchmarks/frameworks.py --quick     # about a minute; the last line is one JSON object
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import lightning as L
import numpy as np
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

WIDTH, CLASSES, BATCH, STEPS = 256, 10, 128, 32  # steps of an epoch
N = STEPS * BATCH - BATCH // 2
"""Not whole batches: of those Lightning leaves the sampler one draw short of a plain loop, which changes later epochs."""


def table(n: int) -> TensorDataset:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(n, WIDTH, generator=g)
    return TensorDataset(x, (x @ torch.randn(WIDTH, CLASSES, generator=g)).argmax(1))


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, CLASSES))


def accuracy(model: nn.Module, data: TensorDataset) -> float:
    x, y = data.tensors
    with torch.no_grad():
        return float((model(x).argmax(1) == y).float().mean())


Result = tuple[float, list[int]]
"""Accuracy, and how often each sample was visited (empty for the framework's own loop)."""

Run = Callable[[bool, int, Callable[[], None]], Result]
"""Trains through our adapter or not, for so many epochs; calls a function before each forward pass and at the end."""


@contextlib.contextmanager
def stepping(model: nn.Module, step: Callable[[], None]) -> Iterator[None]:
    handle = model.register_forward_pre_hook(lambda *_: step())
    yield
    handle.remove()
    step()


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


def under_lightning(ours: bool, epochs: int, step: Callable[[], None]) -> Result:
    data, callback, module = table(N), Salience(), Module(ours)
    trainer = L.Trainer(
        max_epochs=epochs, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[callback] if ours else [],
    )  # fmt: skip
    with stepping(module.net, step):
        trainer.fit(module, DataLoader(data, BATCH, shuffle=True, generator=torch.Generator().manual_seed(0)))
    return accuracy(module.net, data), callback.loader.ledger.seen.tolist() if ours else []


def under_accelerate(ours: bool, epochs: int, step: Callable[[], None]) -> Result:
    data, model, accelerator = table(N), net(), Accelerator(cpu=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(0)
    loader: Any = salience.Loader(data, BATCH) if ours else DataLoader(data, BATCH, shuffle=True, generator=generator)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    with stepping(model, step):
        for _ in range(epochs):
            for x, y in loader:
                logits = model(x)
                losses = F.cross_entropy(logits, y, reduction="none" if ours else "mean")
                accelerator.backward(loader.loss(losses, logits, y) if ours else losses)
                optimizer.step()
                optimizer.zero_grad()
    return accuracy(model, data), loader.ledger.seen.tolist() if ours else []


class Texts(Dataset[dict[str, Any]]):
    def __init__(self, n: int) -> None:
        self.words = torch.randint(1, 50, (n, 24), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": self.words[index], "labels": self.words[index, 0] % 2}


def under_transformers(ours: bool, epochs: int, step: Callable[[], None]) -> Result:
    torch.manual_seed(0)
    size = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 256}
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model, data = (
        BertForSequenceClassification(BertConfig(vocab_size=50, num_labels=2, **size, **still)),
        Texts(STEPS * 32),
    )
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder, num_train_epochs=epochs, per_device_train_batch_size=32, learning_rate=1e-3, use_cpu=True, report_to=[],
            disable_tqdm=True, save_strategy="no", logging_strategy="no", dataloader_pin_memory=False,
        )  # fmt: skip
        trainer = (Trainer if ours else transformers.Trainer)(model, args, train_dataset=data)
        trainer.log = lambda *_, **__: None
        with stepping(model, step):
            trainer.train()
    model.eval()
    with torch.no_grad():
        right = float((model(data.words).logits.argmax(1) == data.words[:, 0] % 2).float().mean())
    return right, trainer.loader.ledger.seen.tolist() if ours else []


class Turns:
    """Two loops in two threads that take a step each by turns."""

    def __init__(self) -> None:
        self.may_go = {True: threading.Semaphore(1), False: threading.Semaphore(0)}
        self.alone = False
        self.spent: dict[bool, list[float]] = {True: [], False: []}

    def pass_on(self, ours: bool) -> None:
        self.spent[ours].append(time.thread_time())
        self.may_go[not ours].release()
        if not self.alone:
            self.may_go[ours].acquire()

    def run(self, run: Run, epochs: int) -> None:
        def loop(ours: bool) -> None:
            self.may_go[ours].acquire()
            try:
                run(ours, epochs, lambda: self.pass_on(ours))
            finally:
                self.alone = True
                self.may_go[not ours].release()

        with ThreadPoolExecutor(2) as threads:
            for done in [threads.submit(loop, ours) for ours in (True, False)]:
                done.result()

    def epochs(self, ours: bool) -> np.ndarray:
        """Processor seconds of each epoch but the first, [epochs - 1]."""
        return np.diff(self.spent[ours]).reshape(-1, STEPS).sum(axis=1)[1:]


def compare(run: Run, epochs: int) -> dict[str, Any]:
    alone, visits = run(True, 2, lambda: None)
    own_loop, _ = run(False, 2, lambda: None)
    turns = Turns()
    turns.run(run, epochs)
    ratios = turns.epochs(ours=True) / turns.epochs(ours=False)
    medians = np.median(np.random.default_rng(0).choice(ratios, (2000, len(ratios))), axis=1)
    return {
        "ratio": round(float(np.median(ratios)), 4),
        "interval": [round(float(q), 4) for q in np.quantile(medians, (0.025, 0.975))],
        "total": round(float(turns.epochs(ours=True).sum() / turns.epochs(ours=False).sum()), 4),
        "step_ms": round(1e3 * float(np.median(turns.epochs(ours=False))) / STEPS, 2),
        "visits_exact": set(visits) == {2}, "accuracy": round(alone, 4), "accuracy_own_loop": round(own_loop, 4),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer epochs")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    transformers.utils.logging.set_verbosity_error()
    epochs = 16 if quick else 60
    found = {}
    for name, run in (
        ("lightning", under_lightning),
        ("accelerate", under_accelerate),
        ("transformers", under_transformers),
    ):
        found[name] = compare(run, epochs)
        print(f"{name:14} {found[name]}")
    print(json.dumps({**{f"{name}_ratio": one["ratio"] for name, one in found.items()}, "runs": found}))


if __name__ == "__main__":
    main()
