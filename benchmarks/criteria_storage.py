"""What does scoring beside the store save on a slow link, and what do fresh scores of unpicked samples gain?

Bytes: images in a real HTTP server behind a capped link. The trainer's own background scorer fetches every sample that it
scores over the link; `salience score` beside the store reads them there, and the link carries weights and 64 bytes per
sample. The same samples and windows for both; `storage_side_bytes_ratio` = bytes of the first over the second, for a small
network and for a ResNet-9, whose weights are larger than what they save here. Break-even: samples per window.

A Source reads neighbouring samples with the gaps between them, so the first is more than the samples' own bytes: `_bare` is the
ratio for those alone, and break-even goes by them.

Accuracy: the same selection with and without fresh scores for the quarter of the unpicked samples that has waited longest,
paired by seed, all of them in time (the best a background scorer can do).

Embarrassing would be a ratio under 1 for the small network, or a gain that is claimed and lies within its own error.
"""

from __future__ import annotations

import shutil
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

import salience
from planted import digits, slim
from salience.app import models
from salience.app.glyphs import render
from salience.app.pixels import Decode
from salience.cli import main
from salience.ledger.statistics import finish, reduce_batch
from salience.signals.remote import QUESTION, RemoteScorer, answer
from salience.signals.scorer import stalest
from store_server import running

RATE, SIZE = 2e6, 128


def folder_of_images(root: Path, n: int, seed: int) -> None:
    drawn = render(n, size=SIZE, copies=0, wrong=0, seed=seed)
    for i, (image, label) in enumerate(zip(drawn.images, drawn.labels, strict=True)):
        folder = root / f"c{label}"
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).convert("RGB").save(folder / f"{i:05}.jpg", quality=90)


def asked_through(folder: str, ids: list[np.ndarray], name: str) -> tuple[int, int, float]:
    """Question and answer bytes, and seconds, of scoring `ids` window by window from the images at `folder`."""
    source, decode = salience.Source(folder), Decode(SIZE)
    labels = torch.from_numpy(source.labels.astype(np.int64))

    def samples(some: np.ndarray) -> tuple[Tensor, Tensor]:
        images = [torch.from_numpy(decode(data)) for data in source.read(some.tolist())]
        return torch.stack(images).float() / 255, labels[some]

    model, crossed, returned = models.build(name, len(source.classes), size=SIZE), 0, 0
    place = Path(tempfile.mkdtemp(prefix="salience-criteria-"))
    scorer = RemoteScorer(model, place, n=len(labels))
    far = models.build(name, len(source.classes), size=SIZE)
    thread = threading.Thread(target=answer, args=(place, far, samples))
    begin = time.perf_counter()
    thread.start()
    for window, some in enumerate(ids):
        scorer.ask(some, window=window)
        crossed += (place / QUESTION).stat().st_size
        got = 0
        while got < len(some) and thread.is_alive():
            returned += sum(file.stat().st_size for file in place.glob("scores-*.npz"))
            got += len(scorer.take()[0])
            time.sleep(0.01)
    seconds = time.perf_counter() - begin
    scorer.close()
    thread.join()
    shutil.rmtree(place)
    return crossed, returned, seconds


def link(quick: bool, seed: int) -> dict[str, Any]:
    n, windows = (2000, 3) if quick else (8000, 6)
    rng = np.random.default_rng(seed)
    ids = [np.sort(rng.permutation(n)[: n // 8]) for _ in range(windows)]  # a quarter of the half that is not picked
    root = Path(tempfile.mkdtemp(prefix="salience-criteria-"))
    folder_of_images(root / "set", n, seed)
    found: dict[str, Any] = {}
    with running(root, rate=RATE, latency=0.02) as store:
        packed = root / "packed"
        main(["pack", str(root / "set"), str(packed)])  # one object per image would be no fair trainer
        before = store.counts().bytes
        _, _, far_seconds = asked_through(f"{store.url}/packed", ids, "cnn")
        images = store.counts().bytes - before
        sizes = salience.Source(str(packed)).sizes
        bare = int(sum(sizes[some].sum() for some in ids))
        weights, scores, seconds = asked_through(str(packed), ids, "cnn")
    shutil.rmtree(root)
    sent = {"": weights, "_resnet9": windows * weights_of("resnet9")}  # its scores are as many bytes
    for key, crossing in sent.items():
        found[f"storage_side_bytes_ratio{key}"] = round(images / (crossing + scores), 2)
        found[f"storage_side_bytes_ratio_bare{key}"] = round(bare / (crossing + scores), 2)
        found[f"break_even_samples{key}"] = round(crossing / windows / ((bare - scores) / sum(map(len, ids))))
    link = (weights + scores) / RATE
    return found | {"trainer_side_seconds": round(far_seconds, 1), "storage_side_seconds": round(seconds + link, 1)}


def weights_of(name: str) -> int:
    """Bytes of a question about one sample."""
    place = Path(tempfile.mkdtemp(prefix="salience-criteria-"))
    RemoteScorer(models.build(name, 10, size=SIZE), place, n=1).ask(np.zeros(1, dtype=np.int64), window=0)
    size = (place / QUESTION).stat().st_size
    shutil.rmtree(place)
    return size


def accuracy(select: str, *, fresh: bool, n: int, epochs: int, seed: int) -> float:
    images = digits(n, seed)
    x, y = torch.from_numpy(images.x).float() / 255 - 0.5, torch.from_numpy(images.y)
    test_x, test_y = torch.from_numpy(images.rest_x).float() / 255 - 0.5, torch.from_numpy(images.rest_y)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = slim(1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=5e-4, nesterov=True)
    selector = salience.Selector(n, batch_size=64, epochs=epochs, select=select, labels=y, seed=seed)
    schedule = salience.ProgressLR(optimizer, selector, "one_cycle")
    rng = np.random.default_rng(seed)
    for window in range(epochs):
        model.train()
        for ids, _ in selector:
            logits = model(x[ids])
            loss = selector.loss(F.cross_entropy(logits, y[ids], reduction="none"), logits, y[ids])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        model.eval()
        if fresh and selector.plan is not None:
            stale = stalest(selector.plan.ids, selector.ledger.last_seen, rng)
            if len(stale):
                with torch.no_grad():
                    logits = model(x[stale])
                    losses = F.cross_entropy(logits, y[stale], reduction="none")
                names, rows = reduce_batch(losses, logits, y[stale])
                kept = finish(dict(zip(names, rows.numpy(), strict=True)))
                selector.ledger.record(stale, kept, window=window, trained=False, unique=True)
    with torch.no_grad():
        return float((model(test_x).argmax(1) == test_y).float().mean())


def measure(*, quick: bool, seed: int = 0) -> dict[str, Any]:
    found = link(quick, seed)
    print(f"  link: {found}", flush=True)
    n, epochs, seeds = (2500, 15, 2) if quick else (4000, 15, 5)
    for select in ("default",) if quick else ("default", "el2n"):
        pairs = [
            [accuracy(select, fresh=fresh, n=n, epochs=epochs, seed=seed + k) for fresh in (False, True)]
            for k in range(seeds)
        ]
        gain = np.array([with_fresh - stale for stale, with_fresh in pairs])
        found[f"fresh_gain_{select}"] = round(float(gain.mean()), 4)
        found[f"fresh_gain_{select}_error"] = round(float(gain.std(ddof=1) / np.sqrt(seeds)), 4)
    return found
