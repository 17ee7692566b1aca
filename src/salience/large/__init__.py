"""Large batches: what keeps accuracy when a step takes many samples, and how many it should take.

`scaled_rate`, `warmup`         the learning rate of a larger batch
`optimizer`, `LARC`             rates per layer
`ghost_batch_norm`              statistics of small batches inside a large one
`GradientNoise`                 noise that small batches have by nature
`NoiseScale`                    how large a batch pays, measured
`Growth`                        batches that grow where the rate would fall
`goodput`, `best_batch`         throughput x statistical efficiency
"""

from salience.large.ghost import GhostBatchNorm, ghost_batch_norm
from salience.large.goodput import best_batch, efficiency, goodput
from salience.large.growth import Growth
from salience.large.injection import GradientNoise
from salience.large.noise import NoiseScale, noise_of
from salience.large.optimizers import LARC, optimizer
from salience.large.rates import scaled_rate, warmup

__all__ = [
    "LARC",
    "GhostBatchNorm",
    "GradientNoise",
    "Growth",
    "NoiseScale",
    "best_batch",
    "efficiency",
    "ghost_batch_norm",
    "goodput",
    "noise_of",
    "optimizer",
    "scaled_rate",
    "warmup",
]
