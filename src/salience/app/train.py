"""The training behind `salience train`: an image classifier from what a Source reads, resumed exactly where it was killed.

    each epoch:   for x, y in loader:  crop and flip -> model -> loader.loss -> SGD step -> ProgressLR step
                  evaluate -> loader.evaluated -> checkpoint

All randomness depends on (seed, epoch, batch) alone, so a resumed run ends with exactly the parameters of one that
was never stopped. Under torchrun each rank takes its part of every batch, and only rank 0 writes.
"""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader

from salience import ledger as ledgers
from salience.app import checkpoint, models, parallel
from salience.app.augment import crop_flip
from salience.app.data import Split, open_split, pixel_statistics
from salience.app.joining import joined_ranks
from salience.app.judge import Judge
from salience.app.parallel import Parallel
from salience.config import TrainConfig
from salience.errors import ConfigError, StateError
from salience.events import Event, EventLog
from salience.events.coding import plain
from salience.feed.sizes import parse_bytes
from salience.ledger import history as histories
from salience.loader import Loader
from salience.ranks import Ranks, local_rank
from salience.report import words
from salience.report.console import SECONDS_BETWEEN_UPDATES, Bars, bars, say, table
from salience.report.text import render
from salience.run import resolve
from salience.schedule import ProgressLR
from salience.seeds import AUGMENT, torch_generator, torch_seed
from salience.select.findings import save_copies
from salience.speed import tune
from salience.treat import Stage, Treat

SHARE = "share"
"""Value of `ledger` that stands for the ledger which all jobs on a feed share."""
MAX_KEPT_TEST_BYTES = 1 << 30
"""Test images are decoded once and kept if they take at most this many bytes."""


def train(config: TrainConfig, saved: Mapping[str, Any] | None = None, judge: Judge | None = None) -> Tally:
    """Train as `config` says, from the beginning or from the checkpoint `saved`, and print progress and results."""
    device = find_device(config.device or (f"cuda:{local_rank()}" if torch.cuda.is_available() else ""))
    folder = Path(config.out)
    if saved is None and checkpoint.exists(folder):
        raise StateError(
            f"{config.out!r} already holds a run; continue it with --resume, or choose another --out. Nothing was changed."
        )
    if not config.data:
        raise ConfigError(
            "There is nothing to train on: --data takes a folder (class = directory), a tar of one, or a URL."
        )
    resolve(config.select or None)  # a wrong name is said now, not after a million files were listed
    Treat.of(config.treat or None)
    parse_bytes(config.cache or "0")
    parallel.check(config)
    models.check_name(config.model, size=config.size or 32)
    with joined_ranks(device) as ranks, parallel.first_rank_writes(folder, ranks):
        if ranks is not None and ranks.rank > 0:
            ranks.barrier()  # rank 0 unpacks what there is to unpack
        with bars() as shown:
            data = open_split(
                config.data, size=config.size, cache=config.cache, max_broken=config.max_broken, feed=config.feed,
                progress=lambda done, of: shown.update("unpacking", done, of),
            )  # fmt: skip
        if ranks is not None and ranks.rank == 0:
            ranks.barrier()
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            run = Training(config, data, device, saved, ranks, judge)
            run.go()
        if run.rank == 0:
            run.finish()
    return run.tally


@dataclass(kw_only=True, slots=True)
class Tally:
    """What a run has done so far, over all its processes."""

    visits: int = 0
    seconds: float = 0.0
    """Seconds since the first batch, evaluation included."""
    overhead: float = 0.0
    """How many of these seconds salience itself took."""
    accuracies: list[float] = field(default_factory=list[float])
    """Accuracy on the test images after each epoch."""


class Training:
    """Model, optimizer, schedule and loader of one run, and their checkpoint."""

    def __init__(
        self,
        config: TrainConfig,
        data: Split,
        device: torch.device,
        saved: Mapping[str, Any] | None,
        ranks: Ranks | None = None,
        judge: Judge | None = None,
    ) -> None:
        self.judge = judge
        self.ranks, self.rank, world = ranks, *((0, 1) if ranks is None else (ranks.rank, ranks.world))
        if config.batch_size % world:
            raise ConfigError(
                f"--batch-size {config.batch_size} cannot be divided among {world} ranks; give a multiple of it."
            )
        self.batch_size = config.batch_size // world
        rate = config.lr or 0.4 * config.batch_size / 512
        if saved is not None:
            checkpoint.check_fits(saved, replace(config, lr=rate, size=data.size), data.classes, data.checksum)
        where = config.data if "://" in config.data else str(Path(config.data).expanduser().resolve())
        self.config = replace(config, lr=rate, size=data.size, data=where)
        self.data, self.device, self.folder = data, device, Path(config.out)
        self.tally = Tally(**saved["tally"]) if saved else Tally()
        self.pixels = saved["pixels"] if saved else pixel_statistics(data)
        self.shift, self.scale = (torch.tensor(v, device=device).reshape(1, -1, 1, 1) * 255 for v in self.pixels)
        self.model = models.seeded(config.model, len(data.classes), size=data.size, seed=config.seed).to(device)
        if device.type == "cuda":
            self.model.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
        self.parallel = Parallel(self.model, self.config, ranks, device)
        self.trained, self.optimizer = self.parallel.trained, self.parallel.optimizer
        self.loader = self._make_loader(fresh=saved is None)
        elsewhere = self.folder / checkpoint.SCORER if config.remote_scores else False
        self.loader.attach(self.model, features=not config.select, background=elsewhere)
        self._keeps_tests = 3 * data.size**2 * data.tested <= MAX_KEPT_TEST_BYTES
        self._tests: list[tuple[Tensor, Tensor]] = []
        self.test = DataLoader(
            data.test, batch_size=config.batch_size, generator=torch.Generator(),
            **self._workers(persistent=not self._keeps_tests),
        )  # fmt: skip
        self.schedule = ProgressLR(self.optimizer, self.loader, "one_cycle")
        self.tuned = None
        if config.auto and not config.zero:
            self.tuned = tune(self.trained, self.optimizer, self.loader)
        if ranks is None and (said := parallel.useless(config)):
            say(said)
        elif config.sync:
            self.parallel.sync(config.sync, self.loader)
        self.number = 0
        """Number of batches of this epoch that are done."""
        self._before = (self.tally.seconds, self.tally.overhead)
        if saved is not None:
            self._restore(saved)

    def _make_loader(self, *, fresh: bool) -> Loader:
        config = self.config
        shared, known = SHARE if config.ledger == SHARE else None, None
        if self.judge is not None:
            shared = self.judge.ledger
        elif config.ledger and shared is None and fresh:
            known = ledgers.load(checkpoint.ledger_file(config.ledger))
        if known is not None and known.n == len(self.data) and _differ(known.label, self.data.labels):
            raise StateError(
                f"The ledger {config.ledger!r} has other classes for these images; it is of another data set."
            )
        log = EventLog(self.folder / checkpoint.LOG if self.rank == 0 else None)
        log.listen(_say_trouble)
        logging.getLogger("salience").addHandler(logging.NullHandler())  # warnings are said above, not again to stderr
        # Crops and flips are drawn for whole batches, on the device; so decoded images are what can be kept.
        stages = {"augment": [Stage(torch.from_numpy, random=False, name="tensor")], "treat": config.treat}
        loader = Loader(
            self.data.train, self.batch_size, epochs=config.epochs, select=config.select or None, seed=config.seed,
            ledger=shared or known, log=log, auto=config.auto, balance=config.balance and self.ranks is not None,
            sinks=[part.strip() for part in config.sinks.split(",") if part.strip()],
            **(stages if config.treat else {}),
            # Not persistent: when observing, a resumed shuffle would then draw other numbers; and a Loader is part of
            # reference cycles, whose collection waits five seconds for each worker that is still there.
            **self._workers(persistent=False),
        )  # fmt: skip
        loader.ledger.set_labels(self.data.labels)
        if self.judge is not None:
            self.judge.follow(loader)
        return loader

    def _workers(self, *, persistent: bool) -> dict[str, Any]:
        workers = self.config.workers
        more: dict[str, Any] = (
            {"worker_init_fn": _ignore_interrupts, "persistent_workers": persistent} if workers else {}
        )
        return {"num_workers": workers, "pin_memory": self.device.type == "cuda", **more}

    # ---------------------------------------------------------------- training

    def go(self) -> None:
        """Train to the end, with a checkpoint after every epoch."""
        begin = time.perf_counter()
        with bars() as shown:
            while self.loader.epoch < self.config.epochs:
                epoch = self.loader.epoch
                loss, accuracy, rate = self._epoch(epoch, begin, shown)
                shown.update("train", self.loader.progress, 1.0, "evaluating")
                tested = self.evaluate() if self.rank == 0 or self.parallel.sharded else 0.0
                if self.ranks is not None:  # of batch norm's statistics, rank 0's count
                    tested = self.ranks.broadcast(tested)
                self.loader.evaluated(tested)
                self.tally.accuracies.append(tested)
                self._clock(begin)
                self.save()
                shown.update("train", self.loader.progress, 1.0, f"accuracy {tested:.1%}")
                say(
                    f"epoch {epoch + 1:>3}/{self.config.epochs}   loss {words.loss(loss)}   train {accuracy:.1%}   "
                    f"test {tested:.1%}   {rate:,.0f} samples/s"
                )
                if self.judge is not None:
                    self.judge.report({"accuracy": tested, "loss": loss})

    def _epoch(self, epoch: int, begin: float, shown: Bars) -> tuple[float, float, float]:
        """Train for one window of the loader. Returns mean loss, accuracy and samples per second of this process."""
        self.model.train()
        losses, right = torch.zeros((), device=self.device), torch.zeros((), device=self.device)
        count, said, start = 0, 0.0, time.perf_counter()
        for x, y in self.loader:
            of_batch, hits = self._step(x, y, epoch)
            losses += of_batch
            right += hits
            count += len(y)
            self.tally.visits = self.loader.visits
            self.number += 1
            if self.config.checkpoint_every and self.number % self.config.checkpoint_every == 0:
                self._clock(begin)
                self.save()
            now = time.perf_counter()
            if now - said >= SECONDS_BETWEEN_UPDATES:  # reading the sums waits for the device: seldom
                said = now
                # Short, so that beside it a bar fits into 80 columns.
                note = f"{epoch + 1}/{self.config.epochs} loss {words.loss(losses.item() / count)} "
                note += f"acc {right.item() / count:.1%} {count / (now - start):,.0f}/s"
                shown.update("train", self.loader.progress, 1.0, note)
        self.number = 0
        done = max(count, 1)
        return losses.item() / done, right.item() / done, count / (time.perf_counter() - start)

    def _step(self, x: Tensor, y: Tensor, epoch: int) -> tuple[Tensor, Tensor]:
        """Train on one batch; returns the sum of its losses and the number of correct predictions, on the device."""
        place = (self.config.seed, AUGMENT, epoch, self.number, *([self.rank] if self.rank else []))
        torch.default_generator.manual_seed(torch_seed(*place, 1))  # for a model with dropout
        if self.device.type == "cuda":
            torch.cuda.default_generators[self.device.index].manual_seed(torch_seed(*place, 1))
        x, y = x.to(self.device, non_blocking=True), y.to(self.device, non_blocking=True)
        self.loader.steps.copied()
        logits = self._forward(crop_flip(x, torch_generator(*place), pad=self.data.size // 8))
        losses = F.cross_entropy(logits, y, reduction="none")
        loss = self.loader.loss(losses, logits, y)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.schedule.step()
        return losses.detach().sum(), (logits.detach().argmax(1) == y).sum()

    def _forward(self, x: Tensor) -> Tensor:
        """float32 logits for uint8 images."""
        x = (x.float() - self.shift) / self.scale
        if self.device.type == "cuda":
            x = x.contiguous(memory_format=torch.channels_last)
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.device.type == "cuda"):
            logits: Tensor = ((self.tuned or self.trained) if self.model.training else self.model)(x)
        if logits.shape != (len(x), len(self.data.classes)):
            raise ConfigError(
                f"Model {self.config.model!r} returned shape {tuple(logits.shape)} for {len(x)} images of "
                f"{len(self.data.classes)} classes; it must return [{len(x)}, {len(self.data.classes)}]."
            )
        return logits.float()

    @torch.no_grad()
    def evaluate(self) -> float:
        """Share of the test images that the model classifies correctly."""
        self.model.eval()
        right = torch.zeros((), device=self.device)
        if self._keeps_tests and not self._tests:
            # Copies: what comes from a worker holds a file each.
            self._tests = [(x, y) if x.is_pinned() else (x.clone(), y.clone()) for x, y in self.test]
        for x, y in self._tests or self.test:
            guess = self._forward(x.to(self.device, non_blocking=True)).argmax(1)
            right += (guess == y.to(self.device, non_blocking=True)).sum()
        return right.item() / self.data.tested

    def _clock(self, begin: float) -> None:
        seconds, overhead = self._before
        self.tally.seconds = seconds + time.perf_counter() - begin
        self.tally.overhead = overhead + self.loader.watch.total

    # ---------------------------------------------------------------- state and result

    def save(self) -> None:
        """Write a checkpoint, and beside it what only each rank knows."""
        own = self.parallel.own_state()
        stamp = [len(self.tally.accuracies), self.number]
        if own is not None and self.rank:
            checkpoint.write_of_rank(self.folder, self.rank, {"stamp": stamp, **own})
        state = {
            "config": plain(self.config),  # without the passwords of URLs
            "classes": list(self.data.classes),
            "names": self.data.checksum,
            "pixels": self.pixels,
            "tally": asdict(self.tally),
            "model": self.parallel.model_state(),
            "optimizer": self.parallel.optimizer_state(),
            "own": own,
            "stamp": stamp,
            "launch": checkpoint.launch(),
            "schedule": self.schedule.state_dict(),
            "loader": self.loader.state_dict(),
            "tuned": None if self.tuned is None else self.tuned.state_dict(),
        }
        if self.rank == 0:
            checkpoint.write(self.folder, state)

    def _restore(self, saved: Mapping[str, Any]) -> None:
        self.loader.load_state_dict(saved["loader"])
        self.parallel.load_model(saved["model"], self.config.model)
        self.parallel.load_optimizer(saved["optimizer"])
        self.schedule.load_state_dict(saved["schedule"])
        if saved.get("own") is not None and saved["config"]["sync"] == self.config.sync:
            own = checkpoint.read_of_rank(self.folder, self.rank, saved["stamp"]) if self.rank else None
            self.parallel.load_own_state(own or saved["own"])
        if self.tuned is not None and saved.get("tuned") is not None:
            self.tuned.load_state_dict(saved["tuned"])
        self.number = len(saved["loader"]["course"]["delivered"])
        say(f"Going on at epoch {min(self.loader.epoch + 1, self.config.epochs)}, after {self.number} of its batches.")

    def finish(self) -> None:
        """Write the ledger; print the result and, without selection, what it could have saved."""
        ledgers.save(self.loader.ledger, self.folder / checkpoint.LEDGER)
        histories.save(self.loader.history, self.folder / checkpoint.HISTORY)
        names = self.data.names
        checkpoint.write_names(self.folder, names.joined, names.ends, np.arange(len(names)))
        copies = self.loader.copies
        if copies is not None:
            save_copies(self.folder / checkpoint.COPIES, copies.group, copies.similarity)
        tally, config = self.tally, self.config
        full = config.epochs * len(self.data)
        table(
            f"{config.model} on {len(self.data):,} images of {len(self.data.classes)} classes, "
            f"tested on {self.data.tested:,}, {self.device}",
            ("select", "accuracy", "best", "visits", "of all", "seconds", "overhead"),
            [(
                config.select or "observe", f"{tally.accuracies[-1]:.2%}", f"{max(tally.accuracies):.2%}",
                f"{tally.visits:,}", f"{tally.visits / full:.0%}", f"{tally.seconds:.1f}",
                f"{tally.overhead / max(tally.seconds, 1e-9):.2%}",
            )],
        )  # fmt: skip
        if not config.select:
            event = self.loader.events.emit("observed", summary=self.loader.summary(local=True))
            say()
            say(render(event["summary"], names=self.data.classes))
            say()
            say("Files of the hardest samples:")
            for sample in event["summary"]["hardest"][:8]:
                say(f"  sample {sample['id']:>8}: {self.data.names[sample['id']]}")
        say()
        written = [checkpoint.LAST, checkpoint.LEDGER, checkpoint.HISTORY, checkpoint.NAMES]
        written += [checkpoint.COPIES] * (copies is not None)
        say(f"In {config.out}: {', '.join(written)}, {checkpoint.LOG}.")
        say(f"Wrong labels, copies and hard images, by file: salience scores {config.out} --suspects --copies --hard")


# ---------------------------------------------------------------- the parts


def find_device(name: str) -> torch.device:
    """The device of that name, which must exist; "" chooses the best one available."""
    if not name:
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        return torch.empty(1, device=name).device  # with its number, where it has one
    except (RuntimeError, AssertionError, NotImplementedError) as cause:  # torch asserts where CUDA is not built in
        raise ConfigError(
            f"There is no device {name!r} here ({str(cause).partition(chr(10))[0]}); `salience doctor` lists what there is."
        ) from cause


def _differ(known: npt.NDArray[Any], labels: npt.NDArray[np.int64]) -> bool:
    """True if a class in the ledger differs from the label."""
    return bool(((known >= 0) & (known != labels)).any())


def _say_trouble(event: Event) -> None:
    if event["kind"] == "warning":
        say(f"warning: {event['text']}")
    elif event["kind"] == "broken":
        say(f"warning: image {event['name']!r} is broken and was replaced by another: {event['reason']}.")


def _ignore_interrupts(worker: int) -> None:
    """Ignore Ctrl-C in workers: the main process handles it and stops them."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
