"""Goodput: throughput x statistical efficiency (AdaptDL, Qiao et al. 2021).

efficiency of batch B   (noise + B0) / (noise + B)        progress of a sample in a batch of B relative to one of B0
step time               (Tc^g + Tn^g)^(1/g)               compute and network, overlapped by g
goodput                 B / step time * efficiency        samples of batch B0 per second that would bring as much progress

`noise` is the gradient noise scale, tr / |G|^2 (McCandlish et al. 2018). It is measured at the weights and rates of the
run as it is: an estimate of the critical batch, and often a doubtful one (see docs/large.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from salience.errors import ConfigError
from salience.watch.model import combined


def efficiency(batch: float, base: float, noise: float) -> float:
    """Progress per sample in steps of `batch`, relative to steps of `base`."""
    if batch <= 0 or base <= 0 or noise < 0:
        raise ConfigError(f"batch {batch} and base {base} must be above 0, and the noise scale {noise} at least 0.")
    return (noise + base) / (noise + batch)


def step_seconds(compute: float, network: float = 0.0, overlap: float = 1.0) -> float:
    """Seconds of a step of which `compute` and `network` overlap: overlap 1 = not at all."""
    return combined(compute, network, overlap)


def goodput(batch: float, base: float, noise: float, seconds: float) -> float:
    """Samples per second, each worth as much as one in a step of `base`."""
    if seconds <= 0:
        raise ConfigError(f"seconds is {seconds}; a step takes more than 0.")
    return batch / seconds * efficiency(batch, base, noise)


def best_batch(batches: Iterable[int], base: int, noise: float, seconds: Callable[[int], float]) -> int:
    """Of these batches the one with the highest goodput, if a step of b samples takes `seconds(b)`; the smallest of equals."""
    found = sorted(batches)
    if not found:
        raise ConfigError("batches is empty; name the batch sizes to choose from.")
    return max(found, key=lambda b: (goodput(b, base, noise, seconds(b)), -b))
