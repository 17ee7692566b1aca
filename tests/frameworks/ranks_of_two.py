"""Two real processes, as torchrun starts them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path


def run_two(script: Path, out: Path, *words: str) -> list[str]:
    """Run `script out words` as ranks 0 and 1, and return what each printed; both must succeed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {
        **os.environ, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), str(out), *words], env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            cwd=out, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        said = [rank.communicate(timeout=240)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], "\n\n".join(said)
    return said
