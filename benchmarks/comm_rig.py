"""Nodes as network namespaces, joined by a bridge, with a cap on what each sends and receives (Linux, root)."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

PREFIX = os.environ.get("SALIENCE_BENCHMARK_NODES") or f"s{os.getpid() % 100_000}n"
"""Of the names of namespaces, so that two benchmarks can run at once; ranks are told that of their benchmark."""


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def shape(nodes: int, mbit: int) -> None:
    """Cap what every node sends and receives; 0 = no cap."""
    for node in range(nodes):
        for space, device in ((f"{PREFIX}{node}", "eth0"), (f"{PREFIX}hub", f"to{node}")):
            run = ["ip", "netns", "exec", space, "tc", "qdisc"]
            subprocess.run([*run, "del", "dev", device, "root"], check=False, capture_output=True)
            if mbit:
                cap = ["tbf", "rate", f"{mbit}mbit", "burst", f"{max(32, mbit // 4)}kb", "latency", "400ms"]
                subprocess.run([*run, "add", "dev", device, "root", *cap], check=True, capture_output=True)


@contextlib.contextmanager
def network(nodes: int) -> Generator[None]:
    """Namespaces for the nodes and for the bridge between them; taken down whatever happens."""
    spaces = [f"{PREFIX}hub", *(f"{PREFIX}{node}" for node in range(nodes))]
    try:
        for space in spaces:
            ip("netns", "add", space)
            ip("-n", space, "link", "set", "lo", "up")
        ip("-n", spaces[0], "link", "add", "br0", "type", "bridge")
        ip("-n", spaces[0], "link", "set", "br0", "up")
        for node in range(nodes):
            space = f"{PREFIX}{node}"
            ip("-n", space, "link", "add", "eth0", "type", "veth", "peer", "name", f"to{node}", "netns", spaces[0])
            ip("-n", space, "addr", "add", f"10.77.0.{node + 1}/24", "dev", "eth0")
            ip("-n", space, "link", "set", "eth0", "up")
            ip("-n", spaces[0], "link", "set", f"to{node}", "master", "br0")
            ip("-n", spaces[0], "link", "set", f"to{node}", "up")
        yield
    finally:
        for space in spaces:
            subprocess.run(["ip", "netns", "del", space], check=False, capture_output=True)


def launch(script: str, jobs: list[Any], nodes: int, per_node: int = 1, limit: float = 900.0) -> list[Any]:
    """Run the jobs on all ranks, one after the other, and return what rank 0 says to each."""
    world = nodes * per_node
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "out.json")
        ranks: list[subprocess.Popen[bytes]] = []
        for rank in range(world):
            said = {"MASTER_ADDR": "10.77.0.1", "MASTER_PORT": "29517", "RANK": str(rank), "WORLD_SIZE": str(world)}
            said |= {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1", "SALIENCE_BENCHMARK_NODES": PREFIX}
            command = [sys.executable, script, "--worker", json.dumps(jobs), "--out", str(out)]
            space = ["ip", "netns", "exec", f"{PREFIX}{rank // per_node}"]
            ranks.append(subprocess.Popen([*space, *command], env={**os.environ, **said}))
        end = time.monotonic() + limit
        try:
            for one in ranks:
                one.wait(timeout=max(1.0, end - time.monotonic()))
        finally:
            for one in ranks:
                one.kill()
                one.wait()
        return json.loads(out.read_text())
