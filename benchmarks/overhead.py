"""What does salience cost when it saves nothing?

Baseline: the plain DataLoader, same items (0.2 ms of work each), same order, in turns within one process; plain against plain
beside it, to show what the machine's noise alone does to the ratio. Then the parts alone: planning 1.28 M samples with
`default` (100 M with --full) and with three scores and two filters where a fifth of the labels is wrong, recording a batch
of 1024 (flush included), bytes a sample. And gradient norms of an attached model: a training step with them over a plain
one, in turns, for "auto" and "all" layers.

What observing costs: `record_host_us` is what one call of `selector.loss(losses, logits, targets)` adds to `losses.mean()`
for 128 samples of 10 classes, in host time, on the CPU and (nothing waits for it) on a GPU. `observe_ratio` is a training
step of about 5 ms on one core, observed, over the same step without salience, through Selector, Loader (without and with
two workers) and the loop of `salience train`, in windows of 64 steps (with --quick 32); on a GPU the same for ResNet-9,
bf16, in whole windows that wait for the device at their end (`--gpu` measures that and `record_host_us_cuda` alone). And
under torch.compile,
`loader.loss` outside and inside the compiled function, and the operator it is made of: graph breaks, and graphs made after
the first step of three windows (`compiled_recompiles`: with `loader.loss` inside).

Embarrassing would be: record_host_us over 100, observe_ratio over 1.02, a graph break or a recompile by `loss`,
copies_share (of a run, looking for near-copies) over 0.01,
loader_ratio over 1.02, watch_overhead (step timers on over off) over 1.01, plan_ms_1_28m over 150,
plan_full_ms_1_28m over 400, plan_s_100m over 15,
record_us_1024 over 60, record_logits_us_1024 over 400, more than 64 bytes a sample, ghost_ratio over 1.15 for either model.

    python benchmarks/overhead.py [--quick | --full]

The last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

import salience
from salience.app.data import Split
from salience.app.models import build
from salience.app.train import Training, find_device
from salience.config import SelectConfig, TrainConfig, Use
from salience.feed.index import Names
from salience.ledger import Ledger, Recorder, bytes_per_sample
from salience.ledger.compiled import register, weighted_sum
from salience.select import Pipeline, preset
from salience.watch import Steps

ITEM_SECONDS = 2e-4
BATCH = 64


class Work(Dataset[tuple[Tensor, int]]):
    """Items that take 0.2 ms of processor time each, as decoding a small image does."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.x = torch.zeros(8)

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        end = time.perf_counter() + ITEM_SECONDS
        while time.perf_counter() < end:
            pass
        return self.x, i % 10


def epoch(loader: Iterable[Any], reduce: Callable[[Tensor], Tensor]) -> float:
    """Seconds for one pass with a loss in every step."""
    begin = time.perf_counter()
    for x, _ in loader:
        reduce(x.sum(1) + 1.0)
    return time.perf_counter() - begin


def loader_ratio(pairs: int, items: int) -> dict[str, Any]:
    data = Work(items)
    plain = DataLoader(data, BATCH, shuffle=True, generator=torch.Generator().manual_seed(0))
    again = DataLoader(data, BATCH, shuffle=True, generator=torch.Generator().manual_seed(0))
    ours = salience.Loader(data, BATCH, seed=0)
    epoch(plain, Tensor.mean), epoch(ours, ours.loss)
    ratios, noise = [], []
    for k in range(pairs):
        arms = [("plain", plain, Tensor.mean), ("again", again, Tensor.mean), ("ours", ours, ours.loss)]
        seconds = {name: epoch(loader, reduce) for name, loader, reduce in arms[k % 3 :] + arms[: k % 3]}
        ratios.append(seconds["ours"] / seconds["plain"])
        noise.append(seconds["again"] / seconds["plain"])
    return {
        "loader_ratio": round(float(np.median(ratios)), 4),
        "loader_ratio_interval": interval(ratios),
        "plain_vs_plain": round(float(np.median(noise)), 4),
        "plain_vs_plain_interval": interval(noise),
        "pairs": pairs,
    }


class Untimed(Steps):
    """Steps nobody looks at."""

    def ask(self) -> None: ...

    def got(self, work: dict[str, float] | None = None, *, held: bool = False) -> None: ...

    def on_loss(self, *_: Any) -> None: ...


def watch_overhead(pairs: int, items: int) -> dict[str, Any]:
    """A pass with the step timers over one without them, in turns."""
    timed, untimed = (salience.Loader(Work(items), BATCH, seed=0) for _ in range(2))
    untimed._run.watching.steps = Untimed()
    epoch(timed, timed.loss), epoch(untimed, untimed.loss)
    ratios = []
    for k in range(pairs):
        seconds = {loader: epoch(loader, loader.loss) for loader in ((timed, untimed) if k % 2 else (untimed, timed))}
        ratios.append(seconds[timed] / seconds[untimed])
    return {"watch_overhead": round(float(np.median(ratios)), 4), "watch_overhead_interval": interval(ratios)}


def interval(values: list[float]) -> list[float]:
    """95% interval of the median, by resampling."""
    rng = np.random.default_rng(0)
    medians = np.median(rng.choice(values, (2000, len(values))), axis=1)
    return [round(float(q), 4) for q in np.quantile(medians, (0.025, 0.975))]


def history(n: int) -> Ledger:
    """A ledger as a few epochs leave it."""
    ledger, rng = Ledger(n), np.random.default_rng(0)
    for start in range(0, n, 10_000_000):
        part = slice(start, min(n, start + 10_000_000))
        count = part.stop - start
        ledger.mean_loss[part] = rng.standard_exponential(count, dtype=np.float32)
        ledger.last_seen[part] = rng.integers(3, 9, count, dtype=np.int32)
        ledger.label[part] = rng.integers(0, 1000, count, dtype=np.int32)
        ledger.margin[part] = 5 - 2 * ledger.mean_loss[part]
        ledger.guess[part] = np.where(ledger.margin[part] > 0, ledger.label[part], (ledger.label[part] + 1) % 1000)
    ledger.last_loss[:] = ledger.mean_loss
    ledger.seen[:] = 5
    return ledger


def noisy_history(n: int) -> Ledger:
    """A ledger as a few epochs leave it where every fifth label is wrong and the model mostly knows better."""
    ledger, rng = history(n), np.random.default_rng(1)
    wrong = rng.random(n) < 0.2
    ledger.margin[:] = np.where(wrong, -5, 5) + rng.standard_normal(n, dtype=np.float32)
    differs = ledger.margin < 0
    ledger.other[:] = (ledger.label + rng.integers(1, 1000, n)) % 1000
    ledger.guess[:] = np.where(differs, ledger.other, ledger.label)
    ledger.guess_p[:] = 1 / (1 + np.exp(-np.abs(ledger.margin)))
    ledger.el2n[:] = np.sqrt(2) / (1 + np.exp(ledger.margin))
    ledger.vote[:, 0], ledger.vote_p[:, 0] = ledger.guess, ledger.guess_p
    ledger.confidence[:] = np.where(differs, 0.01, 0.9)
    ledger.seen[:] = 8
    ledger.course[:] = [(0.3 - 0.01 * k, 0.2, n / 10, 0.0) for k in range(8)]
    ledger.right[:] = np.where(differs, 0, 4)
    ledger.forgotten[:] = np.minimum(ledger.mean_loss, 3)
    return ledger


FULL = SelectConfig(
    filters=(Use(name="noise"), Use(name="class_floor")),
    scores=(Use(name="difficulty"), Use(name="forgetting", weight=0.5), Use(name="staleness", weight=0.2)),
    sampler=Use(name="probability"),
    keep=Use(name="constant", options={"share": 0.4}),
)


def plan_full_seconds(n: int, repeats: int) -> float:
    """Three scores and two filters in the middle of a run: `noise` knows its rate and leaves labels out."""
    ledger, pipeline, took = noisy_history(n), Pipeline(FULL, strict=True), []
    for _ in range(repeats):
        begin = time.perf_counter()
        plan = pipeline.plan(ledger, window=10, windows=20, batch_size=1024, seed=0)
        took.append(time.perf_counter() - begin)
        assert plan.noise > 0.1
    return float(np.median(took))


def plan_seconds(n: int, repeats: int) -> float:
    ledger, pipeline, took = history(n), Pipeline(preset("default"), strict=True), []
    for _ in range(repeats):
        begin = time.perf_counter()
        plan = pipeline.plan(ledger, window=10, windows=30, batch_size=1024, seed=0)
        took.append(time.perf_counter() - begin)
        assert abs(len(plan) - pipeline.budget(10, 30, n)) <= 1024 or not pipeline.exact
    return float(np.median(took))


def record_us(logits: bool, repeats: int) -> float:
    """Microseconds a batch of 1024 over a data set of 1.28 M, flush included."""
    n, size, batches = 1_280_000, 1024, 64
    rng = np.random.default_rng(0)
    order = rng.permutation(n)
    losses, z, y = torch.rand(size), torch.randn(size, 10), torch.randint(0, 10, (size,))
    ledger = Ledger(n)
    ledger.label[:] = -1
    recorder, took, clock = Recorder(ledger), [], time.thread_time
    for repeat in range(repeats + 1):
        begin = clock()
        for k in range(batches):
            ids = order[k * size : (k + 1) * size]
            recorder.record(ids, losses, z if logits else None, y if logits else None, window=repeat, number=k)
        recorder.flush()
        took.append((clock() - begin) / batches * 1e6)
    return float(np.median(took[1:]))


def training(model: str, batch: int, grad_norm: str | None, attach: bool) -> Iterator[float]:
    """Seconds of one training step after the other; without `attach` salience has no part in it."""
    g = torch.Generator().manual_seed(0)
    x, y = torch.randn(16 * batch, 3, 32, 32, generator=g), torch.randint(0, 10, (16 * batch,), generator=g)
    net = build(model, 10)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3, momentum=0.9)
    loader = salience.Selector(len(x), batch_size=batch)
    if attach:
        loader.attach(net, grad_norm=grad_norm)
    while True:
        batches = (
            iter(loader) if attach else iter([(i, None) for i in torch.randperm(len(x), generator=g).split(batch)])
        )
        begin = time.perf_counter()
        for ids, _ in batches:
            logits = net(x[ids])
            losses = F.cross_entropy(logits, y[ids], reduction="none")
            loss = loader.loss(losses) if attach else losses.mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            yield time.perf_counter() - begin
            begin = time.perf_counter()


def ghost_ratio(model: str, batch: int, turns: int) -> dict[str, Any]:
    """A step with gradient norms over a plain one. Each turn takes one step of each, first in another order each time."""
    arms = {
        "plain": training(model, batch, None, attach=False),
        "again": training(model, batch, None, attach=False),
        "auto": training(model, batch, "auto", attach=True),
        "all": training(model, batch, "all", attach=True),
    }
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for turn in range(turns + 2):
        names = list(arms)
        for name in names[turn % 4 :] + names[: turn % 4]:
            took = next(arms[name])
            if turn >= 2:
                seconds[name].append(took)
    ratios = {name: list(np.array(seconds[name]) / np.array(seconds["plain"])) for name in arms}
    return {
        f"ghost_ratio_{model}": round(float(np.median(ratios["auto"])), 4),
        f"ghost_ratio_{model}_interval": interval(ratios["auto"]),
        f"ghost_all_ratio_{model}": round(float(np.median(ratios["all"])), 4),
        f"ghost_plain_vs_plain_{model}": round(float(np.median(ratios["again"])), 4),
        f"ghost_step_ms_{model}": round(1e3 * float(np.median(seconds["plain"])), 2),
    }


OBSERVED = 128
"""Samples in a batch of what follows: with it a step of the model "mlp" takes about 5 ms on one core."""
CLASSES = 10


def record_host(device: str, windows: int) -> dict[str, Any]:
    """Microseconds of host time that `loss` adds to a step: the mean over a window, since only some calls reduce what
    others collect, and of that the median over windows. Nothing is synchronised. On the CPU it is the thread's own time,
    which other programs disturb less; on a GPU waiting counts as well."""
    batches = 256
    n, clock = OBSERVED * batches, time.thread_time if device == "cpu" else time.perf_counter
    labels = torch.arange(n, device=device) % CLASSES
    logits = torch.randn(OBSERVED, CLASSES, device=device, requires_grad=True)
    losses = F.cross_entropy(logits, labels[:OBSERVED], reduction="none")
    selector = salience.Selector(n, batch_size=OBSERVED, device=device)
    added = []
    for _ in range(windows + 2):
        plain = ours = 0.0
        for ids, _ in selector:
            targets = labels[ids]
            begin = clock()
            losses.mean()
            between = clock()
            selector.loss(losses, logits, targets)
            plain, ours = plain + between - begin, ours + clock() - between
        added.append(1e6 * (ours - plain) / batches)
    return {f"record_host_us_{device}": round(float(np.median(added[2:])), 1)}


def images(n: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (n, 3, 32, 32), generator=g, dtype=torch.uint8), torch.arange(n) % CLASSES


def now() -> np.ndarray:
    return np.array((time.perf_counter(), time.process_time()))


Step = Callable[[Tensor, Tensor], None]


def steps_of(batches: Callable[[], Iterable[tuple[Tensor, Tensor]]], step: Step) -> Iterator[np.ndarray]:
    """Seconds of one step after the other, window after window; what is done between windows is part of the next step."""
    begin = now()
    while True:
        for x, y in batches():
            step(x, y)
            yield now() - begin
            begin = now()


def mean(losses: Tensor, logits: Tensor, targets: Tensor) -> Tensor:
    return losses.mean()


def mlp_step(reduce: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Step:
    """A plain training step with `reduce` in the place of the mean."""
    torch.manual_seed(0)
    net = build("mlp", CLASSES)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3, momentum=0.9)

    def step(x: Tensor, y: Tensor) -> None:
        logits = net(x.float() / 255)
        loss = reduce(F.cross_entropy(logits, y, reduction="none"), logits, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def observe_ratio(name: str, arms: Iterable[tuple[Any, Step]], windows: int, steps: int) -> dict[str, Any]:
    """Steps in turns, so that what disturbs the machine disturbs all. Of each step of a window the median over windows
    counts: what salience does every 16 steps (of which `steps` is a multiple), or between windows, is in it, and what
    other programs do is not. `arms` are plain, plain again, and ours."""
    running = [steps_of(*arm) for arm in arms]
    spent = np.zeros((windows + 1, steps, 3, 2))
    for window in range(windows + 1):
        for step in range(steps):
            for arm in np.roll(range(3), step + window):
                spent[window, step, arm] = next(running[arm])
    spent = spent[1:]  # the first one starts workers and fills caches

    def ratios(of: np.ndarray) -> np.ndarray:
        a_window = np.median(of, axis=0).sum(axis=0)
        return a_window / a_window[0]

    rng = np.random.default_rng(0)
    resampled = [ratios(spent[rng.integers(0, windows, windows)])[2, 0] for _ in range(500)]
    plain_ms, _, ours_ms = 1e3 * np.median(spent, axis=0).mean(axis=0)
    return {
        f"observe_ratio_{name}": round(float(ratios(spent)[2, 0]), 4),
        f"observe_ratio_{name}_interval": [round(float(q), 4) for q in np.quantile(resampled, (0.025, 0.975))],
        f"observe_plain_vs_plain_{name}": round(float(ratios(spent)[1, 0]), 4),
        f"observe_cpu_ratio_{name}": round(float(ratios(spent)[2, 1]), 4),
        f"observe_us_{name}": round(1e3 * float(ours_ms[0] - plain_ms[0]), 1),
        f"observe_step_ms_{name}": round(float(plain_ms[0]), 2),
    }


def observe_selector(windows: int, steps: int) -> dict[str, Any]:
    x, y = images(OBSERVED * steps)
    selector = salience.Selector(len(x), batch_size=OBSERVED, labels=y.numpy())

    def plain() -> Iterator[tuple[Tensor, Tensor]]:
        return ((x[ids], y[ids]) for ids in torch.randperm(len(x)).split(OBSERVED))

    def ours() -> Iterator[tuple[Tensor, Tensor]]:
        return ((x[ids], y[ids]) for ids, _ in selector)

    arms = (plain, mlp_step(mean)), (plain, mlp_step(mean)), (ours, mlp_step(selector.loss))
    return observe_ratio("selector", arms, windows, steps)


def observe_loader(workers: int, windows: int, steps: int) -> dict[str, Any]:
    data = TensorDataset(*images(OBSERVED * steps))
    options: dict[str, Any] = {"num_workers": workers, "persistent_workers": workers > 0}
    loader = salience.Loader(data, OBSERVED, **options)
    plain, again = (DataLoader(data, OBSERVED, shuffle=True, **options) for _ in range(2))
    arms = (
        (lambda: plain, mlp_step(mean)),
        (lambda: again, mlp_step(mean)),
        (lambda: loader, mlp_step(loader.loss)),
    )
    return observe_ratio(f"loader_{workers}", arms, windows, steps)


class Unobserved:
    """The loader of `salience train` with a plain DataLoader's batches and a plain mean; for the rest, itself."""

    def __init__(self, loader: salience.Loader) -> None:
        self.loader = loader
        loader.detach()
        self.plain = DataLoader(loader.dataset, loader.batch_size, shuffle=True)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)

    def __len__(self) -> int:
        return len(self.plain)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.plain)

    def loss(self, losses: Tensor, logits: Tensor, targets: Tensor) -> Tensor:
        return losses.mean()


def train_arm(run: Training) -> tuple[Callable[[], Iterable[Any]], Step]:
    """Batches and steps as in the loop of `salience train`, without its evaluation and checkpoints."""

    def step(x: Tensor, y: Tensor) -> None:
        run._step(x, y, run.loader.epoch)
        run.number = (run.number + 1) % len(run.loader)

    run.model.train()
    return lambda: run.loader, step


def train_split(x: Tensor, y: Tensor) -> Split:
    """Images in memory, as `salience train` takes them."""
    return Split(
        train=TensorDataset(x, y), test=TensorDataset(x[:CLASSES], y[:CLASSES]), labels=y.numpy(), tested=CLASSES,
        classes=tuple(map(str, range(CLASSES))), size=32, names=Names.of(map(str, range(len(x)))),
    )  # fmt: skip


def observe_train(windows: int, steps: int) -> dict[str, Any]:
    """The loop of `salience train` as it is over the same with its loader's own work taken out. Looking for near-copies
    falls into few windows and is told apart: `copies_share`, by its own clock, of all the seconds of these windows."""
    split = train_split(*images(OBSERVED * steps))
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        runs = []
        for name in ("plain", "again", "ours"):
            config = TrainConfig(
                model="mlp", epochs=windows + 2, batch_size=OBSERVED, workers=0, device="cpu", out=f"{folder}/{name}"
            )
            runs.append(Training(config, split, torch.device("cpu"), None))
        for run in runs[:2]:
            run.loader = Unobserved(run.loader)  # pyright: ignore
        figures = observe_ratio("train", map(train_arm, runs), windows, steps)
    stated = runs[2].loader.watch.seconds
    seconds = (windows + 1) * steps * figures["observe_step_ms_train"] / 1e3
    return figures | {
        "train_overhead_stated": round(sum(stated.values()) / seconds, 4),
        "copies_share": round(stated.get("copies", 0.0) / seconds, 4),
    }


def gpu_window(batches: Callable[[], Iterable[tuple[Tensor, Tensor]]], step: Step) -> float:
    """Seconds of one window, until the device is done with it."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for x, y in batches():
        step(x, y)
    torch.cuda.synchronize()
    return time.perf_counter() - begin


def resnet_step(reduce: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Step:
    """A training step of ResNet-9 in bf16 on the GPU, with `reduce` in the place of the mean."""
    torch.manual_seed(0)
    net = build("resnet9", CLASSES).cuda().to(memory_format=torch.channels_last)  # pyright: ignore
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3, momentum=0.9)

    def step(x: Tensor, y: Tensor) -> None:
        x = x.cuda(non_blocking=True).float().div(255).contiguous(memory_format=torch.channels_last)
        y = y.cuda(non_blocking=True)
        with torch.autocast("cuda", torch.bfloat16):
            logits = net(x)
        loss = reduce(F.cross_entropy(logits.float(), y, reduction="none"), logits, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def observe_gpu(name: str, windows: int, steps: int, batch: int = 512) -> dict[str, Any]:
    """Whole windows in turns: plain, plain again, observed; through Selector (data on the GPU), Loader (two workers) or
    the loop of `salience train`. Near-copies are looked for beside some of the windows, as in any run."""
    x, y = images(batch * steps)
    with contextlib.ExitStack() as held:
        if name == "selector":
            here, labels = x.cuda(), y.cuda()
            selector = salience.Selector(len(x), batch_size=batch, labels=y.numpy(), device="cuda")
            plain = lambda: ((here[i], labels[i]) for i in torch.randperm(len(x), device="cuda").split(batch))  # noqa: E731
            ours = lambda: ((here[ids], labels[ids]) for ids, _ in selector)  # noqa: E731
            arms = (plain, resnet_step(mean)), (plain, resnet_step(mean)), (ours, resnet_step(selector.loss))
        elif name == "loader":
            options: dict[str, Any] = {"num_workers": 4, "persistent_workers": True, "pin_memory": True}
            loader = salience.Loader(TensorDataset(x, y), batch, **options)
            one, two = (DataLoader(TensorDataset(x, y), batch, shuffle=True, **options) for _ in range(2))
            arms = (
                (lambda: one, resnet_step(mean)),
                (lambda: two, resnet_step(mean)),
                (lambda: loader, resnet_step(loader.loss)),
            )
        else:
            folder = held.enter_context(tempfile.TemporaryDirectory())
            held.enter_context(contextlib.redirect_stdout(io.StringIO()))
            split = train_split(x, y)
            runs = [
                Training(
                    TrainConfig(
                        model="resnet9", epochs=windows + 4, batch_size=batch, workers=0, device="cuda",
                        out=f"{folder}/{arm}",
                    ),
                    split, find_device("cuda"), None,
                )
                for arm in ("plain", "again", "ours")
            ]  # fmt: skip
            for run in runs[:2]:
                run.loader = Unobserved(run.loader)  # pyright: ignore
            arms = tuple(map(train_arm, runs))
        seconds = np.zeros((windows + 2, 3))
        for window in range(windows + 2):
            for arm in np.roll(range(3), window):
                seconds[window, arm] = gpu_window(*arms[arm])
    ratios = seconds[2:] / seconds[2:, :1]
    return {
        f"observe_ratio_gpu_{name}": round(float(np.median(ratios[:, 2])), 4),
        f"observe_ratio_gpu_{name}_interval": interval(list(ratios[:, 2])),
        f"observe_plain_vs_plain_gpu_{name}": round(float(np.median(ratios[:, 1])), 4),
        f"observe_step_ms_gpu_{name}": round(1e3 * float(np.median(seconds[2:, 0])) / steps, 2),
    }


class Weighing:
    """Records and weighs as `loader.loss` does, for the operator of `salience.ledger.compiled` alone."""

    def __init__(self, loader: salience.Loader) -> None:
        self.loader, self.handle = loader, register(self)

    def weigh(self, losses: Tensor, logits: Tensor | None, targets: Tensor | None) -> Tensor:
        self.loader.loss(losses, logits, targets)
        return torch.full_like(losses, 1 / len(losses))


def compiled(way: str) -> dict[str, Any]:
    """Graph breaks, and graphs that were made after the first step, over three windows, with `loss` outside of the compiled
    function, inside it, and as the bare operator; what the compiler does with the graphs does not matter here. `counters`
    is what torch's own tests read."""
    import torch._dynamo  # it takes seconds
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    n, size = 8 * 32, 32
    x, y = torch.randn(n, 20), torch.arange(n) % CLASSES
    net = torch.nn.Linear(20, CLASSES)
    loader = salience.Loader(TensorDataset(x, y), size)
    weighing = Weighing(loader)

    def step(x: Tensor, y: Tensor) -> Any:
        logits = net(x)
        losses = F.cross_entropy(logits, y, reduction="none")
        if way == "outside":
            return losses, logits
        return loader.loss(losses, logits, y) if way == "inside" else weighted_sum(losses, logits, y, weighing.handle)

    fast, graphs = torch.compile(step, backend="eager"), []
    try:
        for _ in range(3):
            for x, y in loader:
                made = fast(x, y)
                (loader.loss(*made, y) if way == "outside" else made).backward()
                graphs.append(counters["stats"]["unique_graphs"])
    except Exception as error:
        return {f"compile_{way}_error": f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"[:120]}
    assert (loader.ledger.seen == 3).all()
    return {
        f"compile_{way}_breaks": sum(counters["graph_break"].values()),
        f"compile_{way}_recompiles": graphs[-1] - graphs[0],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="smaller and within a minute")
    parser.add_argument("--full", action="store_true", help="also plan 100 M samples (needs about 12 GiB)")
    parser.add_argument("--gpu", action="store_true", help="only what observing costs on a GPU")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.gpu:
        figures: dict[str, Any] = record_host("cuda", windows=21 if args.quick else 61)
        for name in ("selector", "loader", "train"):
            print(f"observed windows on the GPU against plain ones, {name} ...", flush=True)
            figures |= observe_gpu(name, windows=7 if args.quick else 25, steps=64)
        print(json.dumps(figures))
        return
    figures = {"record_host_us": 0.0, "observe_ratio": 0.0, "compiled_recompiles": None}
    print("host time of loss() ...", flush=True)
    devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    for device in devices:
        figures |= record_host(device, windows=21 if args.quick else 61)
    figures["record_host_us"] = max(figures[f"record_host_us_{device}"] for device in devices)
    print("observed training steps against plain ones, in turns ...", flush=True)
    windows, steps = (5, 32) if args.quick else (40, 64)
    figures |= observe_selector(windows, steps)
    for workers in (0, 2):
        figures |= observe_loader(workers, windows, steps)
    figures |= observe_train(max(windows, 6), steps)  # near-copies are looked for at the start of the seventh window
    ways = ("selector", "loader_0", "loader_2", "train")
    figures["observe_ratio"] = max(figures[f"observe_ratio_{way}"] for way in ways)
    print("loss() beside and inside a compiled step ...", flush=True)
    figures |= compiled("outside") | compiled("inside") | compiled("operator")
    figures["compiled_recompiles"] = figures.get("compile_inside_recompiles")
    print("loader against plain DataLoader, in turns ...", flush=True)
    items = 1024 if args.quick else 2048
    figures |= loader_ratio(pairs=11 if args.quick else 41, items=items)
    figures |= watch_overhead(pairs=9 if args.quick else 41, items=items)
    print("training steps with gradient norms against plain ones, in turns ...", flush=True)
    figures |= ghost_ratio("mlp", 64, turns=100 if args.quick else 600)
    figures |= ghost_ratio("resnet9", 8, turns=6 if args.quick else 40)
    figures["ghost_ratio"] = max(figures["ghost_ratio_mlp"], figures["ghost_ratio_resnet9"])
    print("planning 1.28 M samples ...", flush=True)
    figures["plan_ms_1_28m"] = round(1e3 * plan_seconds(1_280_000, 3 if args.quick else 15), 1)
    figures["plan_full_ms_1_28m"] = round(1e3 * plan_full_seconds(1_280_000, 3 if args.quick else 15), 1)
    figures["ledger_bytes_per_sample"] = bytes_per_sample()
    print("recording batches of 1024 ...", flush=True)
    figures["record_us_1024"] = round(record_us(False, 7 if args.quick else 15), 1)
    figures["record_logits_us_1024"] = round(record_us(True, 7 if args.quick else 15), 1)
    if args.full:
        print("planning 100 M samples ...", flush=True)
        figures["plan_s_100m"] = round(plan_seconds(100_000_000, 1), 2)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
