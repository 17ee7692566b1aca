"""Several small models on one machine: stacked into one process, or a process for each?

K models of equal shape and different learning rates take the same batches. Stacked, `torch.func` runs all of them in one call
per operation (vmap over their parameters); as processes, each has one thread and the system shares the cores among them.
Seconds per step of all models, the processes' start not counted. The stacked models are checked: after the same steps each has
the parameters that it has when it is trained alone, up to rounding.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, stack_module_state, vmap

MODELS, BATCH, CLASSES = 4, 32, 10
Shape = Callable[[], nn.Module]


def mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, 64), nn.ReLU(), nn.Linear(64, CLASSES))


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.ReLU(), nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.ReLU(),
        nn.Flatten(), nn.Linear(16 * 16, CLASSES),
    )  # fmt: skip


SHAPES: dict[str, Shape] = {"mlp": mlp, "cnn": cnn}


def batches(steps: int) -> list[tuple[Tensor, Tensor]]:
    g = torch.Generator().manual_seed(0)
    made = [
        (torch.randn(BATCH, 3, 16, 16, generator=g), torch.randint(0, CLASSES, (BATCH,), generator=g)) for _ in range(8)
    ]
    return [made[i % 8] for i in range(steps)]


def model(shape: str, k: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(k)
        return SHAPES[shape]()


def rate(k: int) -> float:
    return 0.01 * (k + 1)


def alone(shape: str, k: int, steps: int) -> tuple[float, dict[str, Tensor]]:
    """Seconds of one model by itself, and its parameters afterwards."""
    net, data = model(shape, k), batches(steps)
    optimizer = torch.optim.SGD(net.parameters(), lr=rate(k))
    begin = time.perf_counter()
    for x, y in data:
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimizer.step()
    return time.perf_counter() - begin, {name: value.detach() for name, value in net.named_parameters()}


def stacked(shape: str, steps: int, threads: int) -> tuple[float, dict[str, Tensor]]:
    """Seconds of all models in one process, and their parameters, [K, ...]."""
    torch.set_num_threads(threads)
    nets, data = [model(shape, k) for k in range(MODELS)], batches(steps)
    parameters, buffers = stack_module_state(nets)
    parameters = {name: value.detach() for name, value in parameters.items()}
    rates = torch.tensor([rate(k) for k in range(MODELS)])

    def loss(values: dict[str, Tensor], fixed: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(nets[0], (values, fixed), (x,)), y)

    gradients = vmap(grad(loss), in_dims=(0, 0, None, None))
    begin = time.perf_counter()
    for x, y in data:
        found = gradients(parameters, buffers, x, y)
        for name, value in parameters.items():
            value -= rates.view(-1, *[1] * (value.dim() - 1)) * found[name]
    return time.perf_counter() - begin, parameters


def _process(shape: str, k: int, steps: int, barrier: Any, found: Any) -> None:
    torch.set_num_threads(1)
    alone(shape, k, 3)
    barrier.wait()
    seconds, _ = alone(shape, k, steps)
    found.put(seconds)


def processes(shape: str, steps: int) -> float:
    """Seconds until the last of K processes that began together is done."""
    context = multiprocessing.get_context("fork")
    barrier, found = context.Barrier(MODELS), context.Queue()
    jobs = [context.Process(target=_process, args=(shape, k, steps, barrier, found)) for k in range(MODELS)]
    for job in jobs:
        job.start()
    seconds = max(found.get(timeout=240) for _ in jobs)
    for job in jobs:
        job.join()
    return seconds


def packing(steps: int) -> dict[str, float]:
    """Throughput of stacked models by that of processes, for each shape; prints a row for each."""
    found: dict[str, float] = {}
    for shape in SHAPES:
        own = [alone(shape, k, 5)[1] for k in range(MODELS)]
        together = stacked(shape, 5, 1)[1]
        for k, parameters in enumerate(own):
            for name, value in parameters.items():
                torch.testing.assert_close(together[name][k], value, rtol=1e-3, atol=1e-5)
        apart = processes(shape, steps)
        one = min(stacked(shape, steps, threads)[0] for threads in (1, 2))
        torch.set_num_threads(1)
        print(
            f"packing, {MODELS} x {shape:<4} {1e3 * one / steps:7.2f} ms per step stacked, {1e3 * apart / steps:7.2f} ms as "
            f"{MODELS} processes",
            flush=True,
        )
        found[f"packing_{shape}"] = apart / one
    return {"packing": found["packing_cnn"], **found}
