"""How busy the machine is: CPU, memory, disk, network and GPUs, over a part of a run."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import time
from typing import Any

from salience.events import MachineUse

SECONDS_BETWEEN_SAMPLES = 2.0
MAX_SAMPLES_PER_WINDOW = 12
"""Maximum number of samples per window in the event log."""
MAX_SAMPLES_PER_PROFILE = 120


class Meter:
    """Reads how busy the machine is when asked; each sample covers the time since the previous one."""

    def __init__(self) -> None:
        self._psutil: Any = importlib.import_module("psutil")
        self._gpus = _gpus()
        self._begin = self._then = time.monotonic()
        self._before = _counters(self._psutil)

    def look(self) -> MachineUse:
        now, counters = time.monotonic(), _counters(self._psutil)
        busy, idle, disk, network = (a - b for a, b in zip(counters, self._before, strict=True))
        seconds = max(now - self._then, 1e-6)
        self._then, self._before = now, counters
        return MachineUse(
            seconds=now - self._begin,
            cpu=min(1.0, max(0.0, busy / (busy + idle))) if busy + idle > 0 else 0.0,
            memory=self._psutil.virtual_memory().percent / 100,
            disk=disk / seconds,
            network=network / seconds,
            gpu=tuple(read() for read in self._gpus),
        )


class UsageRecord:
    """A few samples over a period of any length, without a thread: callers call `note` from time to time."""

    def __init__(self, most: int = MAX_SAMPLES_PER_WINDOW) -> None:
        self._most = most
        self._meter: Meter | None = None
        self._looked = 0.0
        """Time of the last sample; 0 = never."""
        if importlib.util.find_spec("psutil") is not None:
            with contextlib.suppress(Exception):  # a container may hide /proc
                self._meter = Meter()
        self.begin()

    def begin(self) -> None:
        """Discard all samples and start again."""
        self._samples: list[MachineUse] = []
        self._every = SECONDS_BETWEEN_SAMPLES
        self._due = (self._looked or time.monotonic()) + self._every

    def note(self, *, now: bool = False) -> bool:
        """Take a sample if it is due, or `now`; when there are too many, every other one is dropped and the rate is halved.

        Returns True if a sample was taken, which takes a good part of a millisecond.
        """
        if self._meter is None or not (now or time.monotonic() >= self._due):
            return False
        self._looked = time.monotonic()
        try:
            self._samples.append(self._meter.look())
        except Exception:  # NVML or the system refuses: training goes on, and nothing is shown
            self._meter = None
            return True
        if len(self._samples) > self._most:
            self._samples, self._every = self._samples[1::2], 2 * self._every
        self._due = self._looked + self._every
        return True

    def taken(self) -> tuple[MachineUse, ...]:
        """The samples since `begin`, including a new one if it is due or if none was ever taken."""
        self.note(now=not self._looked)
        return tuple(self._samples)


def missing_packages() -> list[str]:
    """Packages that are not installed and without which less can be measured."""
    return [name for name in ("psutil", "pynvml") if importlib.util.find_spec(name) is None]


def _counters(psutil: Any) -> tuple[float, float, float, float]:
    """Total seconds all cores were busy and idle, and bytes through disks and networks; 0 if the system does not say.

    Does not use `cpu_percent`, which would also reset what the user's own code measures with it.
    """
    times, disk, network = psutil.cpu_times(), psutil.disk_io_counters(), psutil.net_io_counters()
    idle = times.idle + getattr(times, "iowait", 0.0)
    return (
        sum(times) - idle - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0),  # guests are in user
        idle,
        disk.read_bytes + disk.write_bytes if disk else 0,
        network.bytes_recv + network.bytes_sent if network else 0,
    )


def _gpus() -> list[Any]:
    """A function for each GPU that returns its utilisation; none without NVML or a GPU."""
    if importlib.util.find_spec("pynvml") is None:
        return []
    nvml: Any = importlib.import_module("pynvml")
    try:
        nvml.nvmlInit()
        handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
    except nvml.NVMLError:
        return []
    return [lambda h=handle: nvml.nvmlDeviceGetUtilizationRates(h).gpu / 100 for handle in handles]
