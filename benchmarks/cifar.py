"""The training rig of the accuracy benchmarks: ResNet-9 on CIFAR-10 held on the GPU, one function call a run."""

from __future__ import annotations

import dataclasses
import functools
import os
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import salience
from rivals import policy
from salience.app.data import Images, open_split
from salience.app.models import build
from salience.app.pixels import Decode
from salience.ledger.copies import Copies
from salience.seeds import torch_generator
from salience.select.fetching import Stock
from salience.select.noise import evidence, judge, odds_of_wrong
from salience.select.ranks import rank_normalise

Data = dict[str, np.ndarray]
MEAN, STD = (0.491, 0.482, 0.447), (0.247, 0.243, 0.262)


def _decode(job: tuple[str, bool, int, int]) -> tuple[np.ndarray, np.ndarray]:
    path, test, start, stop = job
    split = open_split(path, size=32)
    images = split.test if test else Images(split.train, Decode(32))
    found = images.__getitems__(range(start, min(stop, len(images))))
    return np.stack([x for x, _ in found]), np.array([y for _, y in found], dtype=np.int64)


def load(path: str, cache: str = str(Path(tempfile.gettempdir()) / "salience-bench")) -> Data:
    """x uint8 [N, 3, 32, 32] and y int64 [N] of both splits, decoded in parallel once and kept as .npz."""
    kept = Path(cache) / "cifar10.npz"
    if kept.exists():
        with np.load(kept) as file:
            return {name: file[name] for name in file.files}
    data: Data = {}
    whole = open_split(path, size=32)
    for name, count in (("train", len(whole)), ("test", whole.tested)):
        jobs = [(path, name == "test", k, k + 2000) for k in range(0, count, 2000)]
        with ProcessPoolExecutor(os.cpu_count()) as pool:
            parts = list(pool.map(_decode, jobs))
        for column, part in zip("xy", zip(*parts, strict=True), strict=True):
            data[f"{name}_{column}"] = np.concatenate(part)
    kept.parent.mkdir(parents=True, exist_ok=True)
    np.savez(kept, **data)  # pyright: ignore[reportArgumentType]
    return data


def corrupt(labels: np.ndarray, kind: str, share: float, seed: int, classes: int = 10) -> np.ndarray:
    """Labels with `share` of them wrong: "symmetric" (any other class) or "pair" (class c becomes c + 1)."""
    rng = np.random.default_rng((seed, 77))
    wrong = rng.permutation(len(labels))[: round(share * len(labels))]
    out = labels.copy()
    step = rng.integers(1, classes, len(wrong)) if kind == "symmetric" else 1
    out[wrong] = (labels[wrong] + step) % classes
    return out


def long_tail(labels: np.ndarray, ratio: float, seed: int, classes: int = 10, most: int = 5000) -> np.ndarray:
    """Positions of a sample with `most * ratio^(-c / (classes - 1))` of class c, shuffled."""
    rng = np.random.default_rng((seed, 78))
    counts = [round(most * ratio ** (-c / (classes - 1))) for c in range(classes)]
    picked = [rng.permutation(np.flatnonzero(labels == c))[:count] for c, count in enumerate(counts)]
    return rng.permutation(np.concatenate(picked))


def with_copies(x: np.ndarray, y: np.ndarray, share: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """As many images, of which `share` are near-copies of others: moved by up to a pixel, brightness +-8%, noise of 4/255.

    Also the origin of each, int64 [n]: images with the same origin are copies of each other.
    """
    rng = np.random.default_rng(80)
    n, m = len(x), round(share * len(x))
    kept = rng.permutation(n)[: n - m]
    source = rng.integers(0, n - m, m)
    dx, dy = rng.integers(0, 3, (2, m, 1))
    padded = np.pad(x[kept[source]], ((0, 0), (0, 0), (1, 1), (1, 1)), mode="edge")
    side = np.arange(x.shape[2])
    moved = padded[np.arange(m)[:, None, None], :, (side + dy)[:, :, None], (side + dx)[:, None, :]].transpose(
        0, 3, 1, 2
    )
    changed = moved * rng.uniform(0.92, 1.08, (m, 1, 1, 1)) + rng.normal(0, 4, moved.shape)
    images = np.concatenate((x[kept], np.clip(changed, 0, 255).astype(np.uint8)))
    return images, np.concatenate((y[kept], y[kept][source])), np.concatenate((np.arange(n - m), source))


def thumbnails(x: np.ndarray) -> np.ndarray:
    """Images as 8 x 8 pixels of mean 0 and deviation 1, float32 [n, 192]: embeddings anybody can make."""
    small = F.adaptive_avg_pool2d(torch.from_numpy(x).float(), 8).flatten(1)
    return ((small - small.mean(1, keepdim=True)) / small.std(1, keepdim=True)).numpy()


@dataclass(frozen=True, kw_only=True)
class Spec:
    """One run."""

    name: str
    select: Any = None
    epochs: int = 24
    seed: int = 0
    batch_size: int = 256
    lr: float = 0.4
    plain: bool = False
    """Without salience: a shuffled pass over everything, losses.mean()."""
    samples: int = 0
    """Train on the first so many samples of a fixed shuffle; 0 = all."""
    tail: float = 1.0
    """The first class has this many times the samples of the last one, falling by a constant factor."""
    model: str = "resnet9"
    flip: bool = True
    scale: float = 1.0
    """The model's outputs are multiplied by this."""
    noise: str = ""
    share: float = 0.0
    copies: float = 0.0
    """This share of the images are near-copies of others."""
    attach: bool = False
    """The selector watches the model: features for near-copies, gradient norms for `grand`."""
    thumbnails: bool = False
    """Embeddings are given instead of taken while training."""
    reference: bool = False
    """What two networks, each trained on one half, think of the other half is given; its visits are counted."""
    trace: str = ""
    cache: float = 0.0
    """A cache of this share of the bytes stands between a store and the run (simulated; every sample the same size)."""


class SimulatedCache:
    """Where the bytes would be, as a Loader's feeding tells its run; no bytes move."""

    def __init__(self, policy: Any, n: int) -> None:
        self._policy, self._n = policy, n

    def stock(self) -> Stock:
        place = np.arange(self._n)
        return Stock(
            resident=self._policy.resident.copy(), shard=(place // 500).astype(np.int32), offset=place % 500 * 3000
        )


class Cached(salience.Selector):
    """A Selector whose plans know what a cache of `share` holds, as those of a Loader with a cache do; no bytes move."""

    def __init__(self, n: int, *, share: float, **options: Any) -> None:
        super().__init__(n, **options)
        self._policy = policy("planned", round(share * n), np.ones(n, dtype=np.int64))
        self._run.feeding = SimulatedCache(self._policy, n)
        self._rivals = {
            name: policy(name, round(share * n), np.ones(n, dtype=np.int64)) for name in ("lru", "never_evict")
        }
        self.fetched: dict[str, list[float]] = {name: [] for name in ("planned", *self._rivals)}
        """Of each window and cache, samples the store would have sent, over all samples."""

    def __iter__(self) -> Any:
        yield from super().__iter__()
        plan = self.plan
        ranks = (
            np.zeros(self.n, np.float32)
            if plan.importance_of_all is None
            else plan.importance_of_all.astype(np.float32)
        )
        for name, cache in {"planned": self._policy, **self._rivals}.items():
            cache.window(ranks, plan.ids)
            missed = [i for i in plan.ids.tolist() if not cache.hit(i) and (cache.offer(i), True)[1]]
            self.fetched[name].append(round(len(missed) / self.n, 4))


class Plain:
    """The loop without salience, behind the few names the rig uses."""

    def __init__(self, n: int, *, batch_size: int, epochs: int, seed: int, device: str) -> None:
        self.n, self.batch_size, self.device = n, batch_size, device
        self.generator = torch.Generator().manual_seed(seed)
        self.done, self.total = 0, epochs * (n // batch_size)

    @property
    def progress(self) -> float:
        return self.done / self.total

    def __iter__(self) -> Any:
        order = torch.randperm(self.n, generator=self.generator).to(self.device)
        for start in range(0, self.n - self.batch_size + 1, self.batch_size):
            self.done += 1
            yield order[start : start + self.batch_size], None

    def loss(self, losses: Tensor, logits: Tensor, targets: Tensor) -> Tensor:
        return losses.mean()


def crop_flip(x: Tensor, generator: torch.Generator, flips: bool = True) -> Tensor:
    """Random crop from 4 pixels of reflection and flip, one draw a sample, on the GPU."""
    n = len(x)
    padded = F.pad(x, (4, 4, 4, 4), mode="reflect")
    dx, dy = torch.randint(0, 9, (2, n, 1), device=x.device, generator=generator)
    columns = torch.arange(32, device=x.device).expand(n, 32)
    flip = torch.rand(n, 1, device=x.device, generator=generator) < (0.5 if flips else 0.0)
    columns = torch.where(flip, 31 - columns, columns) + dx
    rows = torch.arange(32, device=x.device) + dy
    index = torch.arange(n, device=x.device)[:, None, None]
    return padded.permute(0, 2, 3, 1)[index, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


def condition(spec: Spec) -> str:
    """What was done to the data, in a word; empty = nothing."""
    return f"{spec.noise}{spec.share:g}" if spec.noise else f"tail{spec.tail:g}" if spec.tail > 1 else ""


def train(spec: Spec, data: Data, device: str = "cuda", keep: list[nn.Module] | None = None) -> dict[str, Any]:
    """Train once; accuracy on the clean test labels, visits in passes, seconds, what the filters found.

    The trained model is appended to `keep`.
    """
    torch.backends.cudnn.benchmark = True
    truth = data["train_y"]
    x = data["train_x"]
    if spec.samples:
        some = np.random.default_rng(79).permutation(len(truth))[: spec.samples]
        x, truth = x[some], truth[some]
    if spec.tail > 1:
        some = long_tail(truth, spec.tail, spec.seed)
        x, truth = x[some], truth[some]
    labels = corrupt(truth, spec.noise, spec.share, spec.seed) if spec.noise else truth
    origin = None
    if spec.copies:
        x, labels, origin = with_copies(x, labels, spec.copies)
        truth = labels
    reference, extra = _reference(spec, x, labels, data, device) if spec.reference else (None, 0.0)
    images = torch.from_numpy(x).to(device)
    y = torch.from_numpy(labels).to(device)
    mean, std = _pixels(device)
    with torch.random.fork_rng(devices=[torch.device(device)] if device != "cpu" else []):
        torch.manual_seed(spec.seed)
        model = build(spec.model, 10).to(device, memory_format=torch.channels_last)
    decay = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": decay, "weight_decay": 5e-4}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.SGD(groups, lr=spec.lr, momentum=0.9, nesterov=True, fused=device != "cpu")
    select = spec.select
    if isinstance(select, tuple):  # ("oracle", config): a perfect noise filter in front, the ceiling of any
        select = dataclasses.replace(select[1], filters=(salience.Use(name=_oracle(labels == truth)),))
    selector: Any = Plain(len(y), batch_size=spec.batch_size, epochs=spec.epochs, seed=spec.seed, device=device)
    if not spec.plain:
        make = functools.partial(Cached, share=spec.cache) if spec.cache else salience.Selector
        selector = make(
            len(y), batch_size=spec.batch_size, epochs=spec.epochs, select=select, seed=spec.seed, device=device,
            drop_last=True, trace=spec.trace or None, reference=reference, labels=labels if spec.thumbnails else None,
            embeddings=thumbnails(x) if spec.thumbnails else None,
        )  # fmt: skip
        if spec.attach:
            selector.attach(model)
    schedule = salience.ProgressLR(optimizer, selector)
    draws = torch_generator(spec.seed, 9, device=device)
    forward = backward = round(extra * len(y))
    history: list[Any] = []
    torch.cuda.synchronize() if device != "cpu" else None
    begin = time.perf_counter()
    for epoch in range(spec.epochs):
        model.train()
        for ids, _ in selector:
            inputs = ((crop_flip(images[ids], draws, spec.flip) - mean) / std).contiguous(
                memory_format=torch.channels_last
            )
            targets = y[ids]
            forward += len(ids)
            with torch.autocast("cuda", torch.bfloat16, enabled=device != "cpu"):
                logits = model(inputs) * spec.scale
            losses = F.cross_entropy(logits.float(), targets, reduction="none")
            loss = selector.loss(losses, logits, targets)
            backward += len(targets)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            schedule.step()
        if spec.noise and not spec.plain and epoch % 3 == 2:
            history.append((epoch, *noise_found(selector, labels != truth).values()))
    torch.cuda.synchronize() if device != "cpu" else None
    seconds = time.perf_counter() - begin
    if not spec.plain:
        backward = int(selector.ledger.trained.sum()) + round(extra * len(y))
    if keep is not None:
        keep.append(model)
    right = correct(model, data, mean, std, device)
    by_class = [float(right[data["test_y"] == c].mean()) for c in np.unique(data["test_y"])]
    return {
        "name": spec.name, "seed": spec.seed, "noise": condition(spec),
        "accuracy": round(100 * float(right.mean()), 3), "worst": round(100 * min(by_class), 2),
        "visits": round(forward / len(y), 3), "backward": round(backward / len(y), 3), "seconds": round(seconds, 2),
        "history": history, **({"fetched": selector.fetched} if spec.cache and not spec.plain else {}),
        **({} if origin is None or spec.plain else copies_found(selector, origin)),
        **({} if spec.plain else found(selector, labels, truth)),
    }  # fmt: skip


def _oracle(right: np.ndarray) -> Any:
    def oracle(view: Any) -> Any:
        """Knows which labels are right."""
        return salience.select.Verdict(keep=right if view.clock.time >= 0.3 else None, noise=0.5, reason="knows")

    return oracle


@torch.no_grad()
def correct(model: nn.Module, data: Data, mean: Tensor, std: Tensor, device: str) -> np.ndarray:
    """Which test images the model gets right, bool [n]; each is looked at twice, once mirrored."""
    model.eval()
    right: list[np.ndarray] = []
    for k in range(0, len(data["test_y"]), 1000):
        x = (torch.from_numpy(data["test_x"][k : k + 1000]).to(device) - mean) / std
        with torch.autocast("cuda", torch.bfloat16, enabled=device != "cpu"):
            guess = (model(x) + model(x.flip(3))).argmax(1)
        right.append(guess.cpu().numpy() == data["test_y"][k : k + 1000])
    return np.concatenate(right)


def found(selector: Any, labels: np.ndarray, truth: np.ndarray) -> dict[str, Any]:
    """Seconds of salience's own, what the filters dropped, and how that compares with the truth."""
    notes = [e for e in selector.events.recent if e["kind"] == "plan"]
    out: dict[str, Any] = {"warnings": [e["text"] for e in selector.events.recent if e["kind"] == "warning"][:3]}
    if (labels != truth).any():
        out |= noise_found(selector, labels != truth)
    out["overhead"] = {k: round(v, 3) for k, v in selector.watch.seconds.items()}
    out["picked"] = [e["picked"] for e in notes]
    out["notes"] = [[(f["name"], f["dropped"], f["forced"], f["reason"]) for f in e["filters"]] for e in notes[::6]]
    return out


def noise_found(selector: Any, wrong: np.ndarray) -> dict[str, Any]:
    """How well the noise filter tells wrong labels: AUROC of its odds, precision and recall of its verdict."""
    ledger = selector.ledger
    found, seen = judge(ledger), evidence(ledger.label, ledger.vote, ledger.vote_p)
    suspect = found.suspects()
    odds = odds_of_wrong(ledger.label, ledger.vote, ledger.vote_p, ledger.confidence, seen.transitions)
    order = rank_normalise(odds) * len(wrong)
    n1, n0 = wrong.sum(), (~wrong).sum()
    auroc = (order[wrong].sum() - n1 * n1 / 2) / (n1 * n0)
    return {
        "auroc": round(float(auroc), 4),
        "noise_rate": None if np.isnan(found.rate) else round(found.rate, 4),
        "recall": round(float(suspect[wrong].mean()), 4),
        "precision": round(float(wrong[suspect].mean()) if suspect.any() else 0.0, 4),
    }


def copies_found(selector: Any, origin: np.ndarray) -> dict[str, Any]:
    """Of the images that have a copy, how many share a group with one; of those in a group, how many do."""
    found: Copies | None = selector.copies
    if found is None:
        return {"copies_recall": 0.0, "copies_precision": 0.0}
    has = np.bincount(origin, minlength=len(origin))[origin] > 1
    grouped = found.group >= 0
    pair = found.group.astype(np.int64) * len(origin) + origin
    _, place, times = np.unique(pair, return_inverse=True, return_counts=True)
    right = grouped & (times[place] > 1)
    return {
        "copies_recall": round(float(right[has].mean()), 4),
        "copies_precision": round(float(right[grouped].mean()), 4) if grouped.any() else 0.0,
    }


def _reference(spec: Spec, x: np.ndarray, labels: np.ndarray, data: Data, device: str) -> tuple[np.ndarray, float]:
    """Losses of two four-epoch networks on the halves they were not trained on, and what that cost in passes."""
    losses = np.empty(len(x), dtype=np.float32)
    half = np.random.default_rng(81).permutation(len(x)) % 2 == 0
    for part in (half, ~half):
        small = {**data, "train_x": x[part], "train_y": labels[part]}
        quick = Spec(name="reference", plain=True, epochs=4, seed=spec.seed + 99, batch_size=spec.batch_size, lr=spec.lr,
                     model=spec.model, flip=spec.flip, scale=spec.scale)  # fmt: skip
        models: list[nn.Module] = []
        train(quick, small, device, models)
        losses[~part] = _losses_of(models[0], spec.scale, x[~part], labels[~part], device)
    return losses, 4.0


@torch.no_grad()
def _losses_of(model: nn.Module, scale: float, x: np.ndarray, labels: np.ndarray, device: str) -> np.ndarray:
    mean, std = _pixels(device)
    out: list[np.ndarray] = []
    for k in range(0, len(x), 1000):
        images = (torch.from_numpy(x[k : k + 1000]).to(device) - mean) / std
        logits = model.eval()(images) * scale
        targets = torch.from_numpy(labels[k : k + 1000]).to(device)
        out.append(F.cross_entropy(logits.float(), targets, reduction="none").cpu().numpy())
    return np.concatenate(out)


def _pixels(device: str) -> tuple[Tensor, Tensor]:
    mean, std = (torch.tensor(v, device=device).view(1, 3, 1, 1) * 255 for v in (MEAN, STD))
    return mean, std


LEVELS = 31
"""Steps in which traces keep importance."""


def pack_trace(folder: str, file: str) -> None:
    """The plans of a trace in one small file: who is picked and every sample's importance, which is what caches need."""
    trace = salience.Trace(folder)
    plans = [trace.read(window) for window in range(len(trace))]
    n = plans[0].population
    picked, ranks = np.zeros((len(plans), n), dtype=bool), np.zeros((len(plans), n), dtype=np.uint8)
    for window, plan in enumerate(plans):
        picked[window, plan.ids] = True
        if plan.importance_of_all is not None:
            ranks[window] = np.round(LEVELS * plan.importance_of_all.astype(np.float32))
    np.savez_compressed(
        file, population=n, batch_size=plans[0].batch_size, picked=np.packbits(picked, axis=1), ranks=ranks
    )


def unpack_plans(file: str | Path) -> list[salience.Plan]:
    """The plans of such a file, each in an order of its own; weights are 1, as in `default` and `io`."""
    with np.load(file) as packed:
        n, batch_size = int(packed["population"]), int(packed["batch_size"])
        picked = np.unpackbits(packed["picked"], axis=1, count=n).astype(bool)
        all_ranks = packed["ranks"].astype(np.float32) / LEVELS
    plans: list[salience.Plan] = []
    for window, (mask, ranks) in enumerate(zip(picked, all_ranks, strict=True)):
        ids = np.random.default_rng(window).permutation(np.flatnonzero(mask))
        plan = salience.Plan(
            window=window, population=n, batch_size=batch_size, ids=ids, weights=np.ones(len(ids), np.float32),
            importance=ranks[ids], level=np.zeros(len(ids), np.uint8), ranks=ranks.astype(np.float16),
        )  # fmt: skip
        plans.append(plan)
    return plans


def unpack_trace(file: str | Path, folder: str | Path) -> salience.Trace:
    """A trace to replay (`select=Trace(folder)`) from what `pack_trace` wrote."""
    trace = salience.Trace(folder)
    for plan in unpack_plans(file):
        trace.write(plan)
    return trace
