"""Does auto=True find what holds a run back, and does it end up about as fast as the best setting chosen by hand?

Regimes on two cores, thirty short windows each. The accelerator is a pause, except where computing is the bottleneck.

- storage: samples in a store over HTTP with a bandwidth cap, one worker. By hand: a cache of everything from the start.
- cpu: an augmentation that burns the processor, one worker. By hand: two workers.
- cpu_lossy: the same with auto="lossy". By hand: two workers and treat="reuse".
- compute: a real network on one core; nothing exact helps. By hand: nothing.
- compute_lossy: the same with auto="lossy". By hand: select="default".
- sync: two ranks in network namespaces, 100 Mbit/s between them (Linux, root; otherwise left out), 1.6 MB of gradients. By
  hand: salience.sync(mode="local", steps=32); auto: auto=True and salience.sync(mode="auto"). Plain DDP trains every tenth
  window alone, since it takes so long, and counts ten times.

Arms (plain, by hand, auto) take turns, window by window, in one process, so that a slow minute of the machine hits all of
them.
auto_vs_best = seconds of auto, its probes and trials included, over those of the setting by hand. auto_vs_plain = the same
over plain, for `compute`, where best_vs_plain compares plain with itself: how much the machine's other work blurs.
processor_vs_plain = the same in processor seconds, which that hardly touches. verdicts_right = regimes in which the first
verdict names the right cause, of all.

Embarrassing would be: a wrong verdict, auto_vs_best over 1.10, auto_vs_plain over 1.03, or accuracy under plain by more than
half a point in compute_lossy (select="default" by hand is held to that too).

    python benchmarks/auto.py [--quick] [--regimes storage cpu ...]

The last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import tempfile
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset, TensorDataset

import salience
from comm_rig import launch, network, shape
from salience.feed.pack import PackSettings, pack
from store_server import running

Step = Callable[[Any, Tensor, Tensor], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Regime:
    """One situation, and what is right in it."""

    data: Callable[[], Any]
    batch: int
    step: Callable[[], Step]
    """A new consumer of batches for every arm."""
    options: dict[str, Any]
    best: dict[str, Any]
    """What one would add to, or have instead of, the options by hand."""
    auto: bool | str
    bound: str
    cause: str
    test: Callable[[Step], float] | None = None


def pause(seconds: float) -> Step:
    """An accelerator that is busy for so long."""

    def step(loader: Any, x: Tensor, y: Tensor) -> None:
        time.sleep(seconds)
        loader.loss(((y * 7919) % 101).float() / 101)

    return step


# ---------------------------------------------------------------- storage


def decode(data: Any) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


@contextmanager
def storage(
    windows: int,
    *,
    size: int = 16384,
    rate: float = 5e6,
    latency: float = 0.002,
    busy: float = 0.007,
    lossy: bool = False,
) -> Generator[Regime]:
    n, rng = 320, np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        raw, packed = Path(folder, "raw"), Path(folder, "packed")
        for i in range(n):
            file = raw / f"c{i % 4}" / f"{i:04}.bin"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(rng.bytes(size))
        pack(raw, packed, PackSettings())
        with running(packed, rate=rate, latency=latency) as store:
            yield Regime(
                data=lambda: salience.Source(store.url), batch=8, step=lambda: pause(busy),
                options={"decode": decode, "num_workers": 1}, best={"cache": n * size}, auto="lossy" if lossy else True,
                bound="input", cause="fetch",
            )  # fmt: skip


# ---------------------------------------------------------------- processor


class Numbers(Dataset[Any]):
    def __init__(self, n: int) -> None:
        self.x = torch.randn(n, 64, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        return self.x[i], i % 4


def burn(x: Tensor) -> Tensor:
    """Two milliseconds or so of one core."""
    values = x.numpy().repeat(200)
    for _ in range(4):
        values = np.sort(np.sin(values) + torch.rand(len(values)).numpy())
    return torch.from_numpy(values[:64].astype(np.float32))


def jitter(x: Tensor) -> Tensor:
    return x + 0.1 * torch.randn(x.shape)


@contextmanager
def cpu(windows: int, *, lossy: bool = False) -> Generator[Regime]:
    yield Regime(
        data=lambda: Numbers(320), batch=8, step=lambda: pause(0.002),
        options={"num_workers": 1, "augment": [salience.Stage(burn, freeze=True), jitter]},
        best={"num_workers": 2, **({"treat": "reuse"} if lossy else {})}, auto="lossy" if lossy else True,
        bound="input", cause="burn",
    )  # fmt: skip


# ---------------------------------------------------------------- compute


class Rows(Dataset[Any]):
    """Whole batches of a tensor, so that input costs next to nothing."""

    def __init__(self, data: TensorDataset) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitems__(self, ids: list[int]) -> Any:
        return self.data[ids]


def as_it_is(batch: Any) -> Any:
    return batch


class Learner:
    """A network that is large for one core, and how well it does."""

    def __init__(self, test: TensorDataset) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)
            self.model = nn.Sequential(
                nn.Linear(256, 1536), nn.ReLU(), nn.Linear(1536, 1536), nn.ReLU(), nn.Linear(1536, 10)
            )
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        self.schedule: salience.ProgressLR | None = None
        self.test = test

    def __call__(self, loader: Any, x: Tensor, y: Tensor) -> None:
        self.schedule = self.schedule or salience.ProgressLR(self.optimizer, loader)
        logits = self.model(x)
        loss = loader.loss(F.cross_entropy(logits, y, reduction="none"), logits, y)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.schedule.step()

    def accuracy(self) -> float:
        x, y = self.test.tensors
        with torch.no_grad():
            return float((self.model(x).argmax(1) == y).float().mean())


def clouds(n: int, seed: int) -> TensorDataset:
    """Ten overlapping classes in 256 dimensions."""
    centre = torch.randn(10, 256, generator=torch.Generator().manual_seed(7))
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(10, (n,), generator=g)
    return TensorDataset(0.2 * centre[y] + torch.randn(n, 256, generator=g), y)


@contextmanager
def compute(windows: int, *, lossy: bool = False) -> Generator[Regime]:
    train, test = clouds(2048, 0), clouds(4000, 1)
    yield Regime(
        data=lambda: Rows(train), batch=64, step=lambda: Learner(test), options={"num_workers": 1, "collate_fn": as_it_is},
        best={"select": "default"} if lossy else {}, auto="lossy" if lossy else True,
        bound="compute", cause="", test=lambda step: step.accuracy(),  # pyright: ignore[reportFunctionMemberAccess]
    )  # fmt: skip


# ---------------------------------------------------------------- measuring


def window(loader: Any, step: Step) -> tuple[float, float]:
    """Seconds, and processor seconds of this process and of workers that ended."""
    begin, spent = time.perf_counter(), _processor()
    for x, y in loader:
        step(loader, x, y)
    return time.perf_counter() - begin, _processor() - spent


def _processor() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in used)


def measure(regime: Regime, windows: int) -> dict[str, Any]:
    """What came of plain training, of the setting by hand and of auto."""

    def arm(more: dict[str, Any]) -> tuple[Any, Step]:
        return salience.Loader(regime.data(), regime.batch, epochs=windows, **{**regime.options, **more}), regime.step()

    arms = {
        "plain": arm({}),
        "best": arm(regime.best),
        "auto": arm({"auto": regime.auto}),
    }
    found = compare(arms, windows, regime.bound, regime.cause)
    if regime.test is not None:
        found["accuracy"] = {name: round(regime.test(step), 4) for name, (_, step) in arms.items()}
    return found


def compare(arms: dict[str, tuple[Any, Step]], windows: int, bound: str, cause: str, every: int = 1) -> dict[str, Any]:
    """Let the arms take turns; plain training takes one turn in `every`, which counts for all."""
    names, seconds = list(arms), {name: [0.0] * windows for name in arms}
    processor = dict.fromkeys(arms, 0.0)
    for number in range(windows):
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            if name == "plain" and number % every:
                seconds[name][number] = seconds[name][number - 1]
                continue
            seconds[name][number], spent = window(*arms[name])
            processor[name] += spent
    auto, total = arms["auto"][0], {name: sum(found) for name, found in seconds.items()}
    events = list(auto.events.recent)
    first = next((event for event in events if event["kind"] == "verdict"), {"bound": "", "cause": "", "text": "none"})
    return {
        "auto_vs_best": round(total["auto"] / total["best"], 3),
        "auto_vs_plain": round(total["auto"] / total["plain"], 3),
        "best_vs_plain": round(total["best"] / total["plain"], 3),
        "processor_vs_plain": round(processor["auto"] / processor["plain"], 3),
        "verdict": first["text"],
        "right": first["bound"] == bound and (not cause or first["cause"] == cause),
        "seconds": {name: round(value, 2) for name, value in total.items()},
        "last_ten": {name: round(sum(found[-10:]), 2) for name, found in seconds.items()},
        "decisions": [
            f"{e['window']}: {e['action']} {e['lever']}"
            + (f", predicted {e['predicted']:.2f}" if e["predicted"] else "")
            + (f", measured {e['measured']:.2f}" if e["measured"] else "")
            + (f" ({e['interval'][0]:.2f} and up)" if e["interval"] and e["interval"][0] is not None else "")
            + f": {e['reason']}"
            for e in events
            if e["kind"] == "decision"
        ],
    }


# ---------------------------------------------------------------- gradients between ranks


class Synced:
    """A network under DistributedDataParallel, whose gradients travel in a mode of salience.sync; "" = as DDP does it."""

    def __init__(self, mode: str, **options: Any) -> None:
        self.mode, self.options = mode, options
        self.ddp: DistributedDataParallel | None = None

    def __call__(self, loader: Any, x: Tensor, y: Tensor) -> None:
        if self.ddp is None:
            model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
            self.ddp = DistributedDataParallel(model)
            self.optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
            if self.mode:
                salience.sync(self.ddp, self.optimizer, loader, self.mode, **self.options)
        logits = self.ddp(x)
        loss = loader.loss(F.cross_entropy(logits, y, reduction="none"), logits, y)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()


def sync_rank(windows: int, out: str) -> None:
    """One rank of the regime `sync`; rank 0 writes what was found."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    data = Rows(clouds(2 * 32 * 64, 0))

    def arm(step: Synced, **more: Any) -> tuple[Any, Step]:
        return salience.Loader(data, 32, epochs=windows, collate_fn=as_it_is, **more), step

    arms = {
        "plain": arm(Synced("")),
        "best": arm(Synced("local", steps=32)),
        "auto": arm(Synced("auto"), auto=True),
    }
    found = compare(arms, windows, "sync", "gradient sync", every=10)
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def over_a_slow_link(windows: int) -> dict[str, Any] | None:
    """What came of the regime `sync`; None where this system has no network namespaces for us."""
    if os.geteuid() or not (shutil.which("ip") and shutil.which("tc")):
        return None
    with network(2):
        shape(2, 100)
        return launch(__file__, [windows], 2)


REGIMES: dict[str, Callable[[int], Any]] = {
    "storage": storage,
    "cpu": cpu,
    "cpu_lossy": lambda windows: cpu(windows, lossy=True),
    "compute": compute,
    "compute_lossy": lambda windows: compute(windows, lossy=True),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="twelve windows instead of thirty")
    parser.add_argument("--regimes", nargs="+", choices=[*REGIMES, "sync"], default=[*REGIMES, "sync"])
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        sync_rank(*json.loads(args.worker), args.out)
        return
    torch.set_num_threads(1)
    windows, found = 12 if args.quick else 30, {}
    for name in args.regimes:
        if name == "sync":
            if (of_ranks := over_a_slow_link(windows)) is None:
                print("\nsync: left out, since network namespaces with a cap take Linux, root, ip and tc.")
                continue
            found[name] = of_ranks
        else:
            with REGIMES[name](windows) as regime:
                found[name] = measure(regime, windows)
        print(f"\n{name}: {found[name]['verdict']}")
        print("\n".join(f"  {line}" for line in found[name]["decisions"]))
        print(f"  seconds {found[name]['seconds']}, last ten windows {found[name]['last_ten']}")
        ratios = ("auto_vs_best", "auto_vs_plain", "best_vs_plain")
        print("  " + ", ".join(f"{ratio} {found[name][ratio]}" for ratio in ratios), flush=True)
    print(json.dumps({
        "auto_vs_best": {name: one["auto_vs_best"] for name, one in found.items()},
        "auto_vs_plain": found.get("compute", {}).get("auto_vs_plain"),
        "processor_vs_plain": found.get("compute", {}).get("processor_vs_plain"),
        "verdicts_right": sum(one["right"] for one in found.values()),
        "of": len(found),
        "best_vs_plain": {name: one["best_vs_plain"] for name, one in found.items()},
        "accuracy": {name: one["accuracy"] for name, one in found.items() if "accuracy" in one},
        "windows": windows,
    }))  # fmt: skip


if __name__ == "__main__":
    main()
