"""What do reuse and echo save where input is the bottleneck, and what do they cost in accuracy?

- reuse: rendered JPEGs of 469 x 387 (the mean size in ImageNet), decode + resize to 256, a RandAugment-like stage whose draws
  may be kept, crop + flip to 224. Two workers, a consumer that does nothing. Arms take turns, window by window, in one
  process, from the first window on: a plain DataLoader with the same functions; reuse with r_max 4
  (throughput_vs_plain: the whole run with its first windows; `steady`: without the first two); and the same with the
  deterministic stages alone. `processor`: the ratio of processor seconds over all processes, which hardly
  depends on what else the machine does.
- treat_overhead: the same pipeline with treat="reuse" where no result may be kept, against plain; and plain against plain.
- echo: reading takes 4 ms a sample in each of two workers, a small network learns glyphs. Echo makes 1.5 times the steps and
  reads a fraction of the samples: seconds until the accuracy that always reading ends with, less 0.3 points, is reached
  (echo_speedup; 0 = not reached). The control reads always, in about the time echo took, its schedule fitted to that.
- accuracy (needs a GPU and CIFAR-10): ResNet-9 on the device. Reuse is emulated by its effect: draws of the stage before the
  split are a function of (sample, window in which the intermediate was made), which `salience.treat.levels.assign_slots` gives
  for every visit; crop and flip are fresh. Arms: always fresh; reuse with factors by lot, which is what salience does (blind);
  and with the same factors by importance (reuse), which has the same throughput.

Embarrassing would be: throughput_vs_plain under 2.0, treat_overhead over 1.02, echo_speedup under 1.5, an accuracy_gap below
-0.3 points, or a reuse by importance that is better than ours.

    python benchmarks/cpu_bound.py [--quick] [--accuracy path/to/cifar10 --seeds 8] [--show rows.jsonl]

The last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import io
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
import torch.nn.functional as F
from PIL import Image, ImageEnhance, ImageOps
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import salience
from salience import Stage, Treat
from salience.app.glyphs import render
from salience.app.models import build
from salience.select.ranks import rank_normalise
from salience.stats import t_quantile
from salience.treat.levels import ReuseTable, assign_slots

BATCH, WORKERS = 32, 2
ME = psutil.Process()

# ---------------------------------------------------------------- reuse


class Jpegs(Dataset[Any]):
    """(bytes of a JPEG, class), or what `transform` makes of them."""

    def __init__(self, n: int, transform: Callable[[bytes], Tensor] | None = None) -> None:
        self.files, self.transform = [_jpeg(i) for i in range(n)], transform

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, i: int) -> tuple[Any, int]:
        data = self.files[i]
        return data if self.transform is None else self.transform(data), i


def _jpeg(i: int) -> bytes:
    rng = np.random.default_rng(i)
    coarse = Image.fromarray(rng.integers(0, 256, (25, 25, 3), dtype=np.uint8)).resize(
        (469, 387), Image.Resampling.BICUBIC
    )
    fine = rng.normal(0, 12, (387, 469, 3))
    out = io.BytesIO()
    Image.fromarray(np.clip(np.asarray(coarse) + fine, 0, 255).astype(np.uint8)).save(out, "JPEG", quality=90)
    return out.getvalue()


def decode_resize(data: bytes) -> Image.Image:
    return Image.open(io.BytesIO(data)).convert("RGB").resize((256, 256), Image.Resampling.BILINEAR)


OPERATIONS: tuple[Callable[[Image.Image, float], Image.Image], ...] = (
    lambda x, u: x.rotate(60 * u - 30, Image.Resampling.BILINEAR),
    lambda x, u: x.transform(x.size, Image.Transform.AFFINE, (1, 0.6 * u - 0.3, 0, 0, 1, 0), Image.Resampling.BILINEAR),
    lambda x, u: x.transform(x.size, Image.Transform.AFFINE, (1, 0, 0, 0.6 * u - 0.3, 1, 0), Image.Resampling.BILINEAR),
    lambda x, u: ImageEnhance.Color(x).enhance(0.1 + 1.8 * u),
    lambda x, u: ImageEnhance.Contrast(x).enhance(0.1 + 1.8 * u),
    lambda x, u: ImageEnhance.Brightness(x).enhance(0.1 + 1.8 * u),
    lambda x, u: ImageEnhance.Sharpness(x).enhance(0.1 + 1.8 * u),
    lambda x, u: ImageOps.posterize(x, 4 + int(4 * u)),
    lambda x, u: ImageOps.autocontrast(x),
    lambda x, u: ImageOps.equalize(x),
)


def rand_augment(x: Image.Image) -> Image.Image:
    """Two of ten operations, of a strength drawn too (Cubuk et al. 2020)."""
    for _ in range(2):
        x = OPERATIONS[int(torch.randint(len(OPERATIONS), ()))](x, float(torch.rand(())))
    return x


def crop_flip(x: Image.Image) -> Tensor:
    left, top = torch.randint(0, 33, (2,)).tolist()
    array = np.asarray(x.crop((left, top, left + 224, top + 224)))
    tensor = torch.from_numpy(array.copy()).permute(2, 0, 1)
    return (tensor.flip(2) if torch.rand(()) < 0.5 else tensor).contiguous()


def everything(data: bytes) -> Tensor:
    return crop_flip(rand_augment(decode_resize(data)))


def pass_over(loader: Any, losses: Tensor | None) -> tuple[float, float]:
    """Seconds of one window, and of processor time in all its processes; `losses` make some samples more important."""
    begin, spent = time.perf_counter(), _processor()
    for _, y in loader:
        if losses is not None:
            loader.loss(losses[y])
    return time.perf_counter() - begin, _processor() - spent


def _processor() -> float:
    """Processor seconds of this process and of its workers, which live as long as it."""
    used = [process.cpu_times() for process in (ME, *ME.children())]
    return sum(u.user + u.system for u in used)


def reuse(n: int, windows: int) -> dict[str, Any]:
    data, losses = Jpegs(n), torch.rand(n, generator=torch.Generator().manual_seed(0))
    options: dict[str, Any] = {"num_workers": WORKERS, "persistent_workers": True}
    stages = [Stage(decode_resize, random=False), Stage(rand_augment, random=True, freeze=True), crop_flip]
    plain_data = Jpegs(0, everything)
    plain_data.files = data.files

    def ours(stages: list[Any], treat: Treat | str) -> salience.Loader:
        return salience.Loader(data, BATCH, epochs=windows, augment=stages, treat=treat, **options)

    arms: dict[str, tuple[Any, Tensor | None]] = {
        "plain": (DataLoader(plain_data, BATCH, shuffle=True, **options), None),
        "reuse": (ours(stages, Treat("reuse", r_max=4)), losses),
        "deterministic": (ours(stages, Treat("reuse", r_max=4, split=1)), losses),
    }
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in arms}
    for window in range(windows):
        names = list(arms)
        for name in names[window % len(names) :] + names[: window % len(names)]:
            seconds[name].append(pass_over(*arms[name]))
    spent = {name: np.array(found) for name, found in seconds.items()}
    whole = {name: float(found[:, 0].sum()) for name, found in spent.items()}
    processor = {name: float(found[:, 1].sum()) for name, found in spent.items()}
    steady = {name: float(np.median(found[2:, 0])) for name, found in spent.items()}
    last = told(arms["reuse"][0])
    print(arms["reuse"][0].report().split("\n\n")[-1])
    return {
        "throughput_vs_plain": round(whole["plain"] / whole["reuse"], 3),
        "steady_vs_plain": round(steady["plain"] / steady["reuse"], 3),
        "deterministic_only_vs_plain": round(whole["plain"] / whole["deterministic"], 3),
        "processor_plain_vs_reuse": round(processor["plain"] / processor["reuse"], 3),
        "fresh_share": round(1 - last["reused"] / last["visits"], 3),
        "costs_us": last["costs_us"],
        "plain_images_per_second": round(n * windows / whole["plain"]),
        "images": n,
        "windows": windows,
    }


def nothing_to_save(n: int, turns: int) -> dict[str, Any]:
    """treat="reuse" where no result may be kept, against plain; and plain against plain, which is what the machine blurs.

    Turns in the order ABC, CBA, ...; the ratio is that of all seconds, its interval by resampling turns.
    """
    data = Jpegs(n)
    plain_data = Jpegs(0, everything)
    plain_data.files = data.files
    losses, options = torch.rand(n, generator=torch.Generator().manual_seed(0)), {"num_workers": WORKERS}
    arms: list[tuple[Any, Tensor | None]] = [
        (DataLoader(plain_data, BATCH, shuffle=True, persistent_workers=True, **options), None),
        (
            salience.Loader(
                data, BATCH, epochs=turns + 1, augment=[decode_resize, rand_augment, crop_flip], treat="reuse",
                persistent_workers=True, **options,
            ),
            losses,
        ),
        (DataLoader(plain_data, BATCH, shuffle=True, persistent_workers=True, **options), None),
    ]  # fmt: skip
    for arm in arms:
        pass_over(*arm)
    spent = np.zeros((turns, len(arms), 2))
    for turn in range(turns):
        for k in range(len(arms))[:: 1 if turn % 2 else -1]:
            spent[turn, k] = pass_over(*arms[k])
    drawn = spent[np.random.default_rng(0).integers(0, turns, (2000, turns))].sum(1)

    def ratio(over: Callable[[np.ndarray], np.ndarray], under: Callable[[np.ndarray], np.ndarray]) -> dict[str, Any]:
        ends = np.quantile(over(drawn) / under(drawn), (0.025, 0.975))
        whole = spent.sum(0, keepdims=True)
        return {"ratio": round(float((over(whole) / under(whole))[0]), 4), "interval": ends.round(4).tolist()}

    def plain(what: int) -> Callable[[np.ndarray], np.ndarray]:
        return lambda sums: (sums[:, 0, what] + sums[:, 2, what]) / 2

    ours = ratio(lambda sums: sums[:, 1, 0], plain(0))
    processor = ratio(lambda sums: sums[:, 1, 1], plain(1))
    again = ratio(lambda sums: sums[:, 2, 0], lambda sums: sums[:, 0, 0])
    return {
        "treat_overhead": ours["ratio"], "treat_overhead_interval": ours["interval"],
        "treat_overhead_processor": processor["ratio"], "treat_overhead_processor_interval": processor["interval"],
        "plain_vs_plain": again["ratio"], "plain_vs_plain_interval": again["interval"],
    }  # fmt: skip


def told(loader: salience.Loader) -> dict[str, Any]:
    """What the Loader last said of its stages."""
    return next(event for event in reversed(list(loader.events.recent)) if event["kind"] == "treat")


# ---------------------------------------------------------------- echo


class Remote(Dataset[Any]):
    """Glyphs that take `seconds` to arrive."""

    def __init__(self, images: np.ndarray, labels: np.ndarray, seconds: float) -> None:
        self.images, self.labels, self.seconds = images, labels, seconds

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        time.sleep(self.seconds)
        return torch.from_numpy(self.images[i])[None], int(self.labels[i])


def shift(x: Tensor) -> Tensor:
    """Up to three pixels each way."""
    dx, dy = torch.randint(-3, 4, (2,)).tolist()
    return x.roll((dx, dy), (1, 2))


def learn(treat: Treat | None, n: int, windows: int, seed: int) -> tuple[list[float], list[float], salience.Loader]:
    """Seconds of training and accuracy on the test images, after each window."""
    train, test = render(n, copies=0, wrong=0), render(5000, copies=0, wrong=0, split="test")
    loader = salience.Loader(
        Remote(train.images, train.labels, 0.004), 25, epochs=windows, augment=[shift], treat=treat, seed=seed,
        num_workers=WORKERS, persistent_workers=True,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = build("cnn", 10, channels=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9, nesterov=True)
    schedule = salience.ProgressLR(optimizer, loader)
    seconds, accuracy, spent = [], [], 0.0
    for _ in range(windows):
        begin = time.perf_counter()
        for x, y in loader:
            losses = F.cross_entropy(model(x.float() / 255 - 0.5), y, reduction="none")
            loss = loader.loss(losses)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        spent += time.perf_counter() - begin
        seconds.append(spent)
        model.eval()
        with torch.no_grad():
            guess = model(torch.from_numpy(test.images)[:, None].float() / 255 - 0.5).argmax(1).numpy()
        model.train()
        accuracy.append(100 * float((guess == test.labels).mean()))
    return seconds, accuracy, loader


def echo(n: int, windows: int, seeds: int) -> dict[str, Any]:
    """Each seed with always reading, with echo, and with always reading in about as much time as echo took."""
    speedups, gaps, shorter, read, views = [], [], [], [], []
    for seed in range(seeds):
        always, reached, _ = learn(None, n, windows, seed)
        some, gained, loader = learn(Treat("echo", distance=1), n, round(1.5 * windows), seed)
        _, hurried, _ = learn(None, n, max(1, round(windows * some[-1] / always[-1])), seed)
        target = reached[-1] - 0.3
        when = next((s for s, a in zip(some, gained, strict=True) if a >= target), float("inf"))
        before = next(s for s, a in zip(always, reached, strict=True) if a >= target)
        speedups.append(before / when)
        gaps.append(gained[-1] - reached[-1])
        shorter.append(hurried[-1] - reached[-1])
        last = told(loader)
        read.append(1 - last["reused"] / last["visits"])
        views.append(last["views"])
        print(
            f"seed {seed}: always {before:.1f} s to {target:.2f}%, echo {when:.1f} s; ends: always {reached[-1]:.2f}% after "
            f"{always[-1]:.1f} s, echo {gained[-1]:.2f}% after {some[-1]:.1f} s, always in that time {hurried[-1]:.2f}%",
            flush=True,
        )
    return {
        "echo_speedup": round(float(np.median(speedups)), 3),
        "echo_speedups": [round(s, 3) for s in speedups],
        "echo_accuracy_gap": round(float(np.mean(gaps)), 3),
        "shorter_accuracy_gap": round(float(np.mean(shorter)), 3),
        "echo_read_share": round(float(np.mean(read)), 3),
        "echo_views": views,
    }


# ---------------------------------------------------------------- accuracy, on a GPU


def hashed(ids: Tensor, created: Tensor, count: int) -> Tensor:
    """Uniform numbers [B, count] that depend on (sample, window) alone."""
    k = torch.arange(count, device=ids.device)
    z = ids[:, None] * 1_000_003 + created[:, None] * 7_919 + k * 104_729 + 12_345
    for shift_by, factor in ((16, 0x45D9F3B), (16, 0x45D9F3B), (16, 1)):
        z = ((z ^ (z >> shift_by)) * factor) & 0xFFFFFFFF
    return z.float() / 2**32


def augment_like(x: Tensor, u: Tensor) -> Tensor:
    """Rotation, shear, contrast, brightness and a hole of 8 pixels, each with probability 0.4; x [B, 3, 32, 32] in 0 to 255."""
    on, size = u[:, :5] < 0.4, 2 * u[:, 5:10] - 1
    angle, shear = on[:, 0] * size[:, 0] * 0.5, on[:, 1] * size[:, 1] * 0.3
    zero = torch.zeros_like(angle)
    rows = torch.stack((angle.cos(), -angle.sin() + shear, zero), 1), torch.stack((angle.sin(), angle.cos(), zero), 1)
    grid = F.affine_grid(torch.stack(rows, 1), list(x.shape), align_corners=False)
    out = F.grid_sample(x, grid, padding_mode="reflection", align_corners=False)
    mean = out.mean((1, 2, 3), keepdim=True)
    out = mean + (out - mean) * (1 + on[:, 2] * 0.7 * size[:, 2])[:, None, None, None]
    out = out * (1 + on[:, 3] * 0.5 * size[:, 3])[:, None, None, None]
    side = torch.arange(32, device=x.device)
    top, left = (u[:, 10] * 25).long()[:, None], (u[:, 11] * 25).long()[:, None]
    hole = ((side >= top) & (side < top + 8))[:, :, None] & ((side >= left) & (side < left + 8))[:, None, :]
    return torch.where((hole & on[:, 4, None, None])[:, None], mean, out).clamp(0, 255)


def train_treated(arm: str, data: dict[str, np.ndarray], seed: int, *, epochs: int, device: str) -> dict[str, Any]:
    """One run: accuracy, and the share of visits that were fresh."""
    import cifar

    n, r_max = len(data["train_y"]), 4
    images, y = torch.from_numpy(data["train_x"]).to(device), torch.from_numpy(data["train_y"]).to(device)
    mean, std = (255 * torch.tensor(part, device=device)[:, None, None] for part in (cifar.MEAN, cifar.STD))
    with torch.random.fork_rng(devices=[torch.device(device)] if device != "cpu" else []):
        torch.manual_seed(seed)
        model: nn.Module = build("resnet9", 10).to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.4, momentum=0.9, nesterov=True, weight_decay=5e-4)
    selector = salience.Selector(n, batch_size=256, epochs=epochs, seed=seed, device=device, drop_last=True)
    schedule = salience.ProgressLR(optimizer, selector)
    draws = torch.Generator(device).manual_seed(seed)
    table, rng, fresh = ReuseTable.empty(n), np.random.default_rng(seed), 0
    for window in range(epochs):
        factor = np.ones(n, dtype=np.uint8)
        if arm != "fresh":
            known = np.isfinite(selector.ledger.mean_loss).any()
            importance = rank_normalise(selector.ledger.mean_loss) if known else np.full(n, 0.5, dtype=np.float32)
            factor = np.clip(np.ceil(3 * r_max * (1 - importance)), 1, r_max).astype(np.uint8)
            factor = rng.permutation(factor) if arm == "blind" else factor
        ids = rng.permutation(n)
        level, table = assign_slots(ids, factor[ids], table, slots=n, window=window, r_max=r_max, rng=rng)
        fresh += int((level != 2).sum())
        created = torch.from_numpy(np.where(table.slot >= 0, table.created, window).astype(np.int64)).to(device)
        for taken, _ in selector:
            x = augment_like(images[taken].float(), hashed(taken + n * seed, created[taken], 12))
            x = ((cifar.crop_flip(x, draws) - mean) / std).contiguous(memory_format=torch.channels_last)
            with torch.autocast("cuda", torch.bfloat16, enabled=device != "cpu"):
                logits = model(x)
            losses = F.cross_entropy(logits.float(), y[taken], reduction="none")
            loss = selector.loss(losses, logits, y[taken])
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            schedule.step()
    accuracy = 100 * float(cifar.correct(model, data, mean, std, device).mean())
    return {"name": arm, "seed": seed, "accuracy": round(accuracy, 3), "fresh_share": round(fresh / (n * epochs), 3)}


def accuracy(path: str, seeds: int, epochs: int, device: str) -> dict[str, Any]:
    """Paired differences from always fresh, with 95% intervals of the mean (Student's t)."""
    import cifar

    data, found = cifar.load(path), {}
    for seed in range(seeds):
        for arm in ("fresh", "reuse", "blind"):
            row = train_treated(arm, data, seed, epochs=epochs, device=device)
            print(json.dumps(row), flush=True)
            found[arm, seed] = row
    out: dict[str, Any] = {}
    for name, arm in (("accuracy_gap", "blind"), ("by_importance_accuracy_gap", "reuse")):
        out[name], out[f"{name}_interval"] = paired(
            [found[arm, s]["accuracy"] for s in range(seeds)], [found["fresh", s]["accuracy"] for s in range(seeds)]
        )
        out[f"{arm}_fresh_share"] = found[arm, 0]["fresh_share"]
    out["fresh_accuracy"] = round(float(np.mean([found["fresh", s]["accuracy"] for s in range(seeds)])), 3)
    return out


def paired(ours: list[float], theirs: list[float]) -> tuple[float, list[float]]:
    """Mean difference and its 95% interval."""
    gaps = np.array(ours) - np.array(theirs)
    half = t_quantile(0.95, len(gaps) - 1) * gaps.std(ddof=1) / np.sqrt(len(gaps)) if len(gaps) > 1 else float("nan")
    return round(float(gaps.mean()), 3), [round(float(gaps.mean() + sign * half), 3) for sign in (-1, 1)]


def show(path: str) -> None:
    """Recorded rows: each arm against always fresh, by epochs and by k of r = ceil(k r_max (1 - importance))."""
    rows = [json.loads(line) for line in Path(path).read_text().splitlines()]
    found: dict[tuple[int, int, str], dict[int, dict[str, Any]]] = {}
    for row in rows:
        found.setdefault((row["epochs"], row["steep"], row["name"]), {})[row["seed"]] = row

    def against(ours: dict[int, dict[str, Any]], theirs: dict[int, dict[str, Any]]) -> str:
        seeds = sorted(ours)
        gap, ends = paired([ours[s]["accuracy"] for s in seeds], [theirs[s]["accuracy"] for s in seeds])
        return f"{gap:+.3f} ({ends[0]:+.3f} to {ends[1]:+.3f})"

    for (epochs, k, name), arm in sorted(found.items()):
        fresh = found.get((epochs, k, "fresh")) or found[epochs, 1, "fresh"]
        what = "mean accuracy" if name == "fresh" else "against fresh"
        mean = f"{np.mean([row['accuracy'] for row in arm.values()]):.3f}"
        print(
            f"{epochs} epochs, k = {k}, {name}: {arm[0]['fresh_share']:.3f} fresh, {what} "
            f"{mean if name == 'fresh' else against(arm, fresh)}"
        )
        if name == "reuse" and (epochs, k, "blind") in found:
            print(f"{epochs} epochs, k = {k}: reuse against blind {against(arm, found[epochs, k, 'blind'])}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a minute on two cores")
    parser.add_argument("--accuracy", default="", metavar="PATH", help="CIFAR-10 as images; trains on a GPU instead")
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=24)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--show", default="", metavar="FILE", help="recorded rows of such runs")
    given = parser.parse_args()
    if given.show:
        show(given.show)
        return
    if given.accuracy:
        print(json.dumps(accuracy(given.accuracy, given.seeds, given.epochs, given.device)))
        return
    torch.set_num_threads(1)
    found = reuse(160, 8) if given.quick else reuse(1280, 30)
    print(json.dumps(found), flush=True)
    found |= nothing_to_save(160, 6) if given.quick else nothing_to_save(320, 60)
    print(json.dumps(found), flush=True)
    found |= echo(1000, 6, 1) if given.quick else echo(1500, 12, 3)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
