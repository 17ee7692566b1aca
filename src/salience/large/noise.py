"""The gradient noise scale: how large a batch still pays (McCandlish et al. 2018, appendix A).

A gradient over b samples has E|g_b|^2 = |G|^2 + tr / b. From two sizes, b on each rank and B over all of them, with s and S
their squared norms:

    |G|^2 = (B S - b s) / (B - b)        tr = (s - S) / (1/b - 1/B)        noise scale = tr / |G|^2

Both are averaged apart, since a ratio of noisy numbers is biased. Where ranks have unequal b, the mean of their s belongs to
the harmonic mean of b. Per-sample norms are the case b = 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import GradBucket  # pyright: ignore[reportPrivateImportUsage]

from salience.errors import ConfigError
from salience.events import Event, NoiseMeasured

CAVEAT = "samples chosen or weighted by importance have another noise than random ones"


def noise_of(small_square: float, big_square: float, small: float, big: float) -> tuple[float, float]:
    """Estimates of |G|^2 and tr from mean squared norms of gradients over `small` and over `big` samples."""
    if not 0 < small < big:
        raise ConfigError(f"The noise scale needs two batch sizes, the smaller one first; got {small:g} and {big:g}.")
    square = (big * big_square - small * small_square) / (big - small)
    trace = (small_square - big_square) / (1 / small - 1 / big)
    return square, trace


def harmonic_mean(sizes: Any) -> float:
    """The b that belongs to the mean of squared norms on ranks with unequal b."""
    given = np.asarray(sizes, dtype=np.float64)
    return float(len(given) / (1 / given).sum())


class NoiseScale:
    """Measures the gradient noise scale while a run trains, and tells it at the end of every window, as an event `noise`.

    noise = salience.large.NoiseScale(loader)
    noise.hook(ddp)                                  # several ranks: reads the buckets as they pass
    loader.attach(model, grad_norm="all"); ...       # one device: per-sample norms,
    loss.backward(); noise.step(model)               # and the gradient of the batch
    noise.scale                                      # samples
    """

    def __init__(self, loader: Any, *, decay: float = 0.9) -> None:
        """`decay` is the weight of the windows before in the averages of |G|^2 and tr."""
        if not 0 <= decay < 1:
            raise ConfigError(f"decay is {decay}; it must be at least 0 and below 1.")
        self._loader, self._decay = loader, decay
        self.square = self.trace = 0.0
        """Averages of |G|^2 and tr."""
        self._weight = 0.0
        self._sums = np.zeros(4)
        """Of the window: sums of s, of 1 / b, of S and of 1 / B."""
        self._steps = 0
        self._bucket = [0.0, 0.0]
        self._group: Any = None
        self._ghost: tuple[str, ...] | None = None
        self._ddp: nn.Module | None = None
        loader.events.listen(self._heard)

    # --- several ranks ---

    def hook(self, ddp: Any) -> None:
        """Read the gradients of a DistributedDataParallel before and after their exchange, which stays what it was.

        A model has one communication hook: one that `salience.sync` or you have registered cannot be read.
        """
        if not isinstance(ddp, nn.parallel.DistributedDataParallel):
            raise ConfigError(
                f"hook() was given a {type(ddp).__name__}; it reads the buckets of a DistributedDataParallel."
            )
        self._ddp, self._group = ddp, ddp.process_group

        def on_bucket(noise: NoiseScale, bucket):  # pyright: ignore # torch compares annotations, which are text here
            return noise._exchange(bucket)  # pyright: ignore

        ddp.register_comm_hook(self, on_bucket)

    def _exchange(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """The mean over ranks, as DDP itself makes it, and the squared norms before and after."""
        buffer, world = bucket.buffer(), dist.get_world_size(self._group)
        batch, everything = self._loader.batch_len, self._loader.global_batch_len
        local = float(buffer.detach().float().square().sum())
        # loss() divides by B and multiplies by the number of ranks: back to the mean over this rank's samples.
        self._bucket[0] += local * (everything / (batch * world)) ** 2 if batch else 0.0
        last = bucket.is_last()
        buffer.div_(world)
        work = dist.all_reduce(buffer, group=self._group, async_op=True)
        assert work is not None

        def then(future: torch.futures.Future[list[Tensor]]) -> Tensor:
            summed = future.value()[0]
            self._bucket[1] += float(summed.detach().float().square().sum())
            if last:
                self._add(self._bucket[0], self._bucket[1], batch, everything)
                self._bucket = [0.0, 0.0]
            return summed

        return cast("torch.futures.Future[Tensor]", work.get_future().then(then))

    # --- one device ---

    def step(self, model: nn.Module) -> None:
        """Between backward pass and optimizer: take the gradient of the batch. Needs `loader.attach(model, grad_norm="all")`.

        Norms are those of Linear and Conv2d, for which per-sample norms are known.
        """
        covered = [m for m in model.modules() if isinstance(m, (nn.Linear, nn.Conv2d))]
        gradients = [p.grad for m in covered for p in m.parameters(recurse=False) if p.grad is not None]
        if not gradients:
            raise ConfigError("step() found no gradient in a Linear or Conv2d; call it after the backward pass.")
        self._ghost = ("Linear", "Conv2d")
        square = float(torch.stack([g.float().square().sum() for g in gradients]).sum())
        self._add(0.0, square, 1, self._loader.batch_len)

    # --- both ---

    def _add(self, small: float, big: float, b: float, total: float) -> None:
        if b and total:
            self._sums += (small, 1 / b, big, 1 / total)
            self._steps += 1

    def _heard(self, event: Event) -> None:
        if event["kind"] == "window" and self._steps:
            self._close(int(event["window"]))

    def _close(self, window: int) -> None:
        """The window is over: average over its steps, and over ranks."""
        sums, steps = self._sums / self._steps, self._steps
        self._sums, self._steps = np.zeros(4), 0
        if self._group is not None:
            shared = torch.from_numpy(sums).to(next(cast("nn.Module", self._ddp).parameters()).device)
            dist.all_reduce(shared, group=self._group)
            sums = (shared / dist.get_world_size(self._group)).cpu().numpy()
        small, inverse_small, big, inverse_big = sums.tolist()
        if self._ghost is not None:
            ledger = self._loader.ledger
            norms = ledger.grad_norm[(ledger.last_seen == window) & np.isfinite(ledger.grad_norm)].astype(np.float64)
            if not len(norms):
                return
            small = float((norms**2).mean())
        if inverse_small <= inverse_big * (1 + 1e-9):
            return  # one rank, or one sample per batch: there is but one size
        self.enter(small, big, 1 / inverse_small, 1 / inverse_big, window=window, steps=steps)

    def enter(
        self, small_square: float, big_square: float, small: float, big: float, *, window: int = 0, steps: int = 1
    ) -> None:
        """Take mean squared norms over `small` and `big` samples of one window, and tell the noise scale."""
        square, trace = noise_of(small_square, big_square, small, big)
        keep = self._decay if self._weight else 0.0
        self.square, self.trace = keep * self.square + (1 - keep) * square, keep * self.trace + (1 - keep) * trace
        self._weight = 1.0
        if self._loader is not None and getattr(self._loader, "rank", 0) == 0:
            now = None if square <= 0 or trace < 0 else trace / square
            self._loader.events.emit(NoiseMeasured(
                window=window, scale=self.scale, of_window=now, square=self.square, trace=self.trace, small=small, big=big,
                steps=steps, caveat="" if self._random else CAVEAT,
            ))  # fmt: skip

    @property
    def _random(self) -> bool:
        plan = self._loader.plan
        return plan is None or (len(plan) == plan.population and bool((plan.weights == 1).all()))

    @property
    def scale(self) -> float | None:
        """The noise scale in samples; None before it is known, or while the noise hides the gradient."""
        known = self._weight > 0 and self.square > 0 and self.trace >= 0
        return self.trace / self.square if known else None

    def state_dict(self) -> dict[str, Any]:
        return {"square": self.square, "trace": self.trace, "weight": self._weight}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.square, self.trace, self._weight = (float(state[name]) for name in ("square", "trace", "weight"))
