"""Does the default hold up on data it was not made for: a click log, text, segmentation?

Parts of selection.py (`--parts clicks,text,segment`, and the small sets of points.py:
`--parts overlap,concentrated,rare,many,parity`); all data is synthetic, and one core is enough. Per part and seed:
all data, `default`, and **the shorter run** (uniform, the same visits, its schedule fitted to them, whole batches). Model,
data, optimizer and schedule rule (one cycle over visits) are the same in all three. The learning rate of each part was
chosen for the shorter run on seeds 100 and 101, which are not measured here: 0.004 from 0.002, 0.004, 0.008 for clicks and
text (where 0.008 is level with it, and worse for all data in clicks), 0.01 from 0.005, 0.01, 0.02, 0.04 for segment.

Embarrassing would be: `default` more than noise below the shorter run, in any part.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import salience
from points import POINTS, Points
from selection import mean_interval

Rows = list[dict[str, Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """A data set, a model for it, and how it is trained and judged."""

    train: tuple[Tensor, Tensor]
    """Inputs and targets, one row per sample."""
    test: tuple[Tensor, Tensor]
    model: Callable[[], nn.Module]
    losses: Callable[[Tensor, Tensor], Tensor]
    """Outputs and targets to one loss per sample."""
    judge: Callable[[Tensor, Tensor], dict[str, float]]
    """Outputs and targets of the test set to figures in percent, `score` first."""
    classes: bool = False
    """True if outputs and targets are logits and integer classes, which `loss` is then given."""
    batch_size: int
    epochs: int
    lr: float


# ---------------------------------------------------------------- clicks

FIELDS = {"user": 1000, "ad": 400, "site": 100, "category": 20, "device": 8}
"""Categorical fields and their number of ids."""
NUMBERS = 6
"""Numeric fields."""


def clicks(seed: int, *, rows: int = 40_000, tests: int = 20_000) -> Task:
    """A click log: power-law ids, labels drawn from a logistic model with interactions, whose own AUC is 0.82 to 0.83."""
    rng = np.random.default_rng((seed, 1))
    n = rows + tests
    ids = np.stack([_power_law(rng, n, count) for count in FIELDS.values()], axis=1)
    x = rng.normal(size=(n, NUMBERS))
    known = dict(zip(FIELDS, ids.T, strict=True))
    logit = sum(rng.normal(0, 0.5, count)[known[name]] for name, count in FIELDS.items())
    for one, two in (("user", "ad"), ("site", "category")):
        tastes = [rng.normal(0, 0.5, (FIELDS[name], 3))[known[name]] for name in (one, two)]
        logit = logit + (tastes[0] * tastes[1]).sum(1)
    logit = logit + x @ rng.normal(0, 0.4, NUMBERS) + 0.6 * x[:, 0] * x[:, 1] - 0.3 * np.abs(x[:, 2])
    logit = logit + (rng.normal(0, 0.4, (FIELDS["category"], NUMBERS))[known["category"]] * x).sum(1)
    logit = 1.6 * (logit - logit.mean()) / logit.std() - 1.5
    clicked = rng.random(n) < 1 / (1 + np.exp(-logit))
    offsets = np.concatenate(([0], np.cumsum(list(FIELDS.values()))[:-1]))
    inputs = torch.from_numpy(np.concatenate((ids + offsets, x), axis=1)).float()  # ids below 2^24 are exact in float32
    targets = torch.from_numpy(clicked).float()
    return Task(
        train=(inputs[:rows], targets[:rows]), test=(inputs[rows:], targets[rows:]), model=ClickModel,
        losses=nn.BCEWithLogitsLoss(reduction="none"), judge=lambda z, y: {"score": 100 * auc(z.numpy(), y.numpy() > 0)},
        batch_size=256, epochs=10, lr=0.004,
    )  # fmt: skip


def _power_law(rng: np.random.Generator, n: int, count: int, power: float = 1.05) -> np.ndarray:
    p = np.arange(1, count + 1) ** -power
    return rng.choice(count, n, p=p / p.sum())


class ClickModel(nn.Module):
    """Embeddings and numbers into an MLP with one logit."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.table = nn.Embedding(sum(FIELDS.values()), width)
        nn.init.normal_(self.table.weight, std=0.05)
        self.dropout = nn.Dropout(0.2)  # without it the model gets worse after about five passes
        self.head = nn.Sequential(nn.Linear(len(FIELDS) * width + NUMBERS, 64), nn.ReLU(), nn.Dropout(0.2),
                                  nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 1))  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        known = self.dropout(self.table(x[:, : len(FIELDS)].long())).flatten(1)
        return self.head(torch.cat((known, x[:, len(FIELDS) :]), dim=1)).squeeze(1)


def auc(scores: np.ndarray, positive: np.ndarray) -> float:
    """Probability that a positive has a higher score than a negative."""
    rank = np.empty(len(scores))
    rank[np.argsort(scores, kind="stable")] = np.arange(1, len(scores) + 1)
    n1, n0 = positive.sum(), (~positive).sum()
    return float((rank[positive].sum() - n1 * (n1 + 1) / 2) / (n1 * n0))


# ---------------------------------------------------------------- text

WORDS, LENGTH, BUCKETS, TOPICS = 1500, 24, 8192, 12
"""Size of the vocabulary, words per document, buckets of hashed bigrams, classes."""


def text(seed: int, *, documents: int = 8000, tests: int = 4000) -> Task:
    """Documents of twelve topics, the largest about seven times the smallest; pairs of topics differ mostly in their bigrams.

    A tenth of the documents mixes two topics half and half and has the label of either, by the toss of a coin.
    """
    rng = np.random.default_rng((seed, 2))
    n = documents + tests
    size = 8.0 ** -(np.arange(TOPICS) / (TOPICS - 1))
    one = rng.choice(TOPICS, n, p=size / size.sum())
    two = np.where(rng.random(n) < 0.1, (one + rng.integers(1, TOPICS, n)) % TOPICS, one)
    common = np.arange(1, WORDS + 1) ** -1.0
    own = np.where(rng.random((TOPICS // 2, WORDS)) < 0.08, rng.exponential(1.0, (TOPICS // 2, WORDS)), 0.0)
    slant = np.where(rng.random((TOPICS, WORDS)) < 0.03, rng.exponential(1.0, (TOPICS, WORDS)), 0.0)
    parts = ((0.7, common[None]), (0.25, np.repeat(own, 2, axis=0)), (0.05, slant))
    unigrams = np.cumsum(sum(share * p / p.sum(1, keepdims=True) for share, p in parts), axis=1)
    follows = np.stack([rng.permutation(WORDS) for _ in range(TOPICS)])
    words = np.empty((n, LENGTH), dtype=np.int64)
    for place in range(LENGTH):
        topic, drawn = np.where(rng.random(n) < 0.5, one, two), rng.random(n)
        for t in range(TOPICS):
            words[topic == t, place] = np.minimum(np.searchsorted(unigrams[t], drawn[topic == t]), WORDS - 1)
        if place:
            bound = rng.random(n) < 0.2
            words[bound, place] = follows[topic[bound], words[bound, place - 1]]
    label = np.where(rng.random(n) < 0.5, one, two)
    bigrams = WORDS + (words[:, :-1] * 7919 + words[:, 1:] * 104_729) % BUCKETS
    inputs, targets = torch.from_numpy(np.concatenate((words, bigrams), axis=1)), torch.from_numpy(label)
    return Task(
        train=(inputs[:documents], targets[:documents]), test=(inputs[documents:], targets[documents:]), model=TextModel,
        losses=nn.CrossEntropyLoss(reduction="none"), judge=accuracies, classes=True, batch_size=64, epochs=12, lr=0.004,
    )  # fmt: skip


class TextModel(nn.Module):
    """The mean embedding of words and bigrams into an MLP."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(WORDS + BUCKETS, width, mode="sum")
        nn.init.normal_(self.bag.weight, std=0.1)
        self.head = nn.Sequential(
            nn.Dropout(0.5), nn.Linear(width, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, TOPICS)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.bag(x))


def accuracies(logits: Tensor, targets: Tensor) -> dict[str, float]:
    """Accuracy, and that of the class with the lowest."""
    right = (logits.argmax(1) == targets).double()
    worst = min(float(right[targets == c].mean()) for c in targets.unique())
    return {"score": 100 * float(right.mean()), "worst": 100 * worst}


# ---------------------------------------------------------------- segment

SIDE, SHAPES = 32, 3
"""Pixels per side, and kinds of shapes; class 0 is the background."""


def segment(seed: int, *, images: int = 3000, tests: int = 1000) -> Task:
    """Noisy grey images with up to three discs, squares and diamonds of little contrast; each pixel has a class."""
    rng = np.random.default_rng((seed, 3))
    n = images + tests
    y, x = np.mgrid[:SIDE, :SIDE].astype(np.float32)
    tilt = rng.normal(0, 0.02, (2, n, 1, 1))
    pictures = tilt[0] * (x - SIDE / 2) + tilt[1] * (y - SIDE / 2)
    masks = np.zeros((n, SIDE, SIDE), dtype=np.int64)
    count = rng.integers(0, 4, n)
    for turn in range(3):
        kind, radius = rng.integers(0, SHAPES, n), rng.uniform(4, 9, (n, 1, 1))
        dx, dy = np.abs(x - rng.uniform(4, SIDE - 4, (n, 1, 1))), np.abs(y - rng.uniform(4, SIDE - 4, (n, 1, 1)))
        distance = np.choose(kind[:, None, None], (np.hypot(dx, dy), np.maximum(dx, dy) * 1.13, (dx + dy) * 0.8))
        inside = (distance < radius) & (count > turn)[:, None, None]
        contrast = rng.uniform(0.5, 1.2, (n, 1, 1)) * rng.choice((-1, 1), (n, 1, 1))
        pictures = np.where(inside, contrast, pictures)
        masks[inside] = np.broadcast_to(kind[:, None, None] + 1, inside.shape)[inside]
    pictures = pictures + rng.uniform(0.1, 0.4, (n, 1, 1)) * rng.normal(size=pictures.shape)
    inputs, targets = torch.from_numpy(pictures[:, None]).float(), torch.from_numpy(masks)
    return Task(
        train=(inputs[:images], targets[:images]), test=(inputs[images:], targets[images:]), model=TinyUNet,
        losses=lambda z, y: F.cross_entropy(z, y, reduction="none").mean(dim=(1, 2)), judge=mean_iou,
        batch_size=32, epochs=12, lr=0.01,
    )  # fmt: skip


class TinyUNet(nn.Module):
    """Three scales, with skips between the ways down and up."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        a, b, c = width, 2 * width, 4 * width
        self.fine = _convolution(1, a)
        self.middle = nn.Sequential(_convolution(a, b, stride=2), _convolution(b, b))
        self.coarse = nn.Sequential(_convolution(b, c, stride=2), _convolution(c, c))
        self.narrow = nn.ModuleList((nn.Conv2d(c, b, 1), nn.Conv2d(b, a, 1)))
        self.up = nn.ModuleList((_convolution(b, b), _convolution(a, a)))
        self.head = nn.Conv2d(a, SHAPES + 1, 1)
        self.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        fine = self.fine(x.contiguous(memory_format=torch.channels_last))
        middle = self.middle(fine)
        out = self.coarse(middle)
        for skip, narrow, up in zip((middle, fine), self.narrow, self.up, strict=True):
            out = up(F.interpolate(narrow(out), scale_factor=2) + skip)
        return self.head(out)


def _convolution(a: int, b: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(a, b, 3, stride, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU())


def mean_iou(logits: Tensor, targets: Tensor) -> dict[str, float]:
    """Intersection over union of each class, over all pixels of the test set; the mean of the classes."""
    guess = logits.argmax(1)
    shares = [
        float(((guess == c) & (targets == c)).sum() / ((guess == c) | (targets == c)).sum()) for c in range(SHAPES + 1)
    ]
    return {"score": 100 * float(np.mean(shares)), "worst": 100 * min(shares)}


# ---------------------------------------------------------------- points


def of_points(make: Callable[[int], Points], seed: int) -> Task:
    """A set of points, for an MLP with two hidden layers."""
    points = make(seed)
    classes, width = int(points.y.max()) + 1, points.width
    x, test_x = (torch.from_numpy(part).float() for part in (points.x, points.test_x))
    return Task(
        train=(x, torch.from_numpy(points.y)), test=(test_x, torch.from_numpy(points.test_y)),
        model=lambda: nn.Sequential(
            nn.Linear(x.shape[1], width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, classes)
        ),
        losses=nn.CrossEntropyLoss(reduction="none"), judge=accuracies, classes=True, batch_size=64, epochs=points.epochs,
        lr=0.004,
    )  # fmt: skip


# ---------------------------------------------------------------- the three runs

PARTS: dict[str, Callable[[int], Task]] = {"clicks": clicks, "text": text, "segment": segment} | {
    name: functools.partial(of_points, make) for name, make in POINTS.items()
}
METRICS = {"clicks": "AUC", "segment": "mean IoU"}
"""What `score` is; accuracy elsewhere."""


class Uniform:
    """The loop without salience, behind the few names of a Selector: `visits` samples, whole batches, each pass shuffled."""

    def __init__(self, n: int, *, batch_size: int, visits: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        passes = [torch.randperm(n, generator=generator) for _ in range(-(-visits // n))]
        self._batches = torch.cat(passes)[: visits // batch_size * batch_size].split(batch_size)
        self._done = 0

    @property
    def progress(self) -> float:
        return self._done / len(self._batches)

    def __iter__(self) -> Iterator[tuple[Tensor, None]]:
        for ids in self._batches:
            self._done += 1
            yield ids, None

    def loss(self, losses: Tensor, *_: Tensor) -> Tensor:
        return losses.mean()


def train(task: Task, seed: int, *, visits: int | None = None) -> dict[str, Any]:
    """Train once, with `default` or uniformly for so many visits; figures of the test set, visits, passes and seconds."""
    (inputs, targets), n = task.train, len(task.train[1])
    if visits is None:
        source = salience.Selector(n, batch_size=task.batch_size, epochs=task.epochs, select="default", seed=seed)
    else:
        source = Uniform(n, batch_size=task.batch_size, visits=visits, seed=seed)
    torch.manual_seed(seed)
    model = task.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=task.lr, weight_decay=0.01)
    schedule = salience.ProgressLR(optimizer, source)
    done, begin = 0, time.perf_counter()
    for _ in range(task.epochs if visits is None else 1):
        for ids, _ in source:
            outputs = model(inputs[ids])
            losses = task.losses(outputs, targets[ids])
            loss = source.loss(losses, outputs, targets[ids]) if task.classes else source.loss(losses)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            done += len(ids)
    seconds = time.perf_counter() - begin
    model.eval()
    with torch.no_grad():
        outputs = torch.cat([model(some) for some in task.test[0].split(1000)])
    found = {name: round(value, 3) for name, value in task.judge(outputs, task.test[1]).items()}
    return {**found, "visits": done, "passes": round(done / n, 3), "seconds": round(seconds, 2)}


def run(parts: list[str], seeds: int, store: Path) -> dict[str, Any]:
    """Run parts on one core, appending each row to `store`; the tables on stdout, and the figures as one dict."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    rows: Rows = []
    for part in parts:
        for seed in range(seeds):
            for row in measure(part, seed):
                rows.append(row)
                with store.open("a") as file:
                    file.write(json.dumps(row) + "\n")
                what = f"{METRICS.get(part, 'accuracy')} {row['score']:.2f}, {row['passes']:.2f} passes, {row['seconds']:.0f} s"
                print(f"{part:<12} {row['name']:<8} seed {seed}: {what}", flush=True)
    torch.set_num_threads(threads)
    return figures(rows)


def measure(part: str, seed: int) -> Iterator[dict[str, Any]]:
    """The three rows of a part and seed: all data, `default`, and the shorter run of as many visits."""
    task = PARTS[part](seed)
    ours = train(task, seed)
    for name, visits in (("full", task.epochs * len(task.train[1])), ("default", None), ("shorter", ours["visits"])):
        row = ours if visits is None else train(task, seed, visits=visits)
        yield {"part": part, "name": name, "seed": seed, **row}


def figures(rows: Rows) -> dict[str, Any]:
    """The tables on stdout, and the figures as one dict; rows of other benchmarks are ignored."""
    at: dict[str, dict[str, dict[int, dict[str, Any]]]] = {}
    for row in rows:
        if "part" in row:
            at.setdefault(row["part"], {}).setdefault(row["name"], {})[row["seed"]] = row
    out: dict[str, Any] = {}
    for part, runs in at.items():
        metrics = {"score": METRICS.get(part, "accuracy"), "worst": "worst class"}
        metrics = {key: metric for key, metric in metrics.items() if key in next(iter(runs["default"].values()))}
        said = "".join(f"{metric:>16}" for metric in metrics.values())
        print(f"\n{part:<12} {said} {'passes':>7} {'seconds':>8} {'seeds':>6}")
        for name, of in runs.items():
            said = "".join(f"{_spread([run[key] for run in of.values()]):>16}" for key in metrics)
            passes, seconds = (float(np.mean([run[key] for run in of.values()])) for key in ("passes", "seconds"))
            print(f"{name:<12} {said} {passes:>7.2f} {seconds:>8.1f} {len(of):>6}")
        for key, metric in metrics.items():
            figure = f"{part}_vs_shorter" if key == "score" else f"{part}_{key}_vs_shorter"
            pairs = [
                (runs["default"][s][key], runs["shorter"][s][key]) for s in runs["default"] if s in runs["shorter"]
            ]
            mean, half = mean_interval([ours - shorter for ours, shorter in pairs])
            out[figure] = round(mean, 3)
            if len(pairs) > 1:
                out[f"{figure}_interval"] = [round(mean - half, 3), round(mean + half, 3)]
            interval = f" ({mean - half:+.2f} to {mean + half:+.2f})" if len(pairs) > 1 else ""
            print(f"{metric}, default - shorter: {mean:+.2f}{interval}")
        out |= {f"{part}_{name}": _mean(of, "score") for name, of in runs.items()}
        out |= {f"{part}_{name}_passes": _mean(of, "passes") for name, of in runs.items()}
    return out


def _mean(runs: dict[int, dict[str, Any]], key: str) -> float:
    return round(float(np.mean([run[key] for run in runs.values()])), 3)


def _spread(values: list[float]) -> str:
    mean, half = mean_interval(values)
    return f"{mean:.2f} ± {half:.2f}" if len(values) > 1 else f"{mean:.2f}"
