"""How busy the machine is: a thread that looks twice a second at CPU, memory, disk, network and GPUs."""

from __future__ import annotations

import importlib
import importlib.util
import threading
import time
from dataclasses import dataclass
from typing import Any

SECONDS_BETWEEN_SAMPLES = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class UsageSample:
    """How busy the machine was at one moment."""

    seconds: float
    """Seconds since sampling started."""
    cpu: float
    """Share of all cores that was busy."""
    memory: float
    """Share of the memory in use."""
    disk: float
    """Bytes per second read and written."""
    network: float
    """Bytes per second received and sent."""
    gpu: tuple[float, ...] = ()
    """Share of the time in which each GPU had work."""


class Usage:
    """Samples the machine while a block runs: `with Usage() as usage: ...`; `usage.samples` is empty without psutil."""

    def __init__(self, every: float = SECONDS_BETWEEN_SAMPLES) -> None:
        self.samples: list[UsageSample] = []
        self.missing = [name for name in ("psutil", "pynvml") if importlib.util.find_spec(name) is None]
        """Packages that are not installed, without which less can be measured."""
        self._every = every
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="salience-usage", daemon=True)

    def __enter__(self) -> Usage:
        if "psutil" not in self.missing:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        psutil: Any = importlib.import_module("psutil")
        gpus = _gpus()
        begin = then = time.monotonic()
        psutil.cpu_percent()
        before = _traffic(psutil)
        while not self._over.wait(self._every):
            now, traffic = time.monotonic(), _traffic(psutil)
            disk, network = ((a - b) / (now - then) for a, b in zip(traffic, before, strict=True))
            self.samples.append(
                UsageSample(
                    seconds=now - begin,
                    cpu=psutil.cpu_percent() / 100,
                    memory=psutil.virtual_memory().percent / 100,
                    disk=disk,
                    network=network,
                    gpu=tuple(read() for read in gpus),
                )
            )
            then, before = now, traffic


def _traffic(psutil: Any) -> tuple[int, int]:
    """Bytes through disks and networks so far; 0 where the system does not say."""
    disk, network = psutil.disk_io_counters(), psutil.net_io_counters()
    return (
        disk.read_bytes + disk.write_bytes if disk else 0,
        network.bytes_recv + network.bytes_sent if network else 0,
    )


def _gpus() -> list[Any]:
    """A function for each GPU that gives its utilisation; none without NVML or a GPU."""
    if importlib.util.find_spec("pynvml") is None:
        return []
    nvml: Any = importlib.import_module("pynvml")
    try:
        nvml.nvmlInit()
        handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
    except nvml.NVMLError:
        return []
    return [lambda h=handle: nvml.nvmlDeviceGetUtilizationRates(h).gpu / 100 for handle in handles]
