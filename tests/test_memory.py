"""Shared memory: seen by other processes, by nobody else, gone with its maker, with and without anonymous files."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import stat
import subprocess
import sys
import tempfile

import numpy as np
import pytest

from salience import memory as memories
from salience.errors import StateError
from salience.memory import Memory, Token, fence, node_memory


@pytest.fixture(params=["anonymous", "named"])
def kind(request, monkeypatch, tmp_path):
    """The two ways to have memory; without memfd_create is what another system looks like."""
    if request.param == "named":
        monkeypatch.delattr(os, "memfd_create", raising=False)
        monkeypatch.setattr(memories, "_folder", lambda size: tmp_path)
    return request.param


def write(memory: Memory) -> None:
    memory.array(np.int64, 2)[1] = 7


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_other_processes_see_what_is_written(kind, start):
    memory = Memory(100)
    assert memory.array(np.uint8, 100).sum() == 0
    other = multiprocessing.get_context(start).Process(target=write, args=(memory,))
    other.start()
    other.join(60)
    assert memory.array(np.int64, 2).tolist() == [0, 7]


def test_an_opened_copy_stays_valid_when_the_maker_lets_go_and_cannot_be_opened_again(kind):
    memory = Memory(64)
    token, again = memory.token, pickle.loads(pickle.dumps(memory))
    array = memory.array(np.uint8, 64)
    memory.close()
    again.array(np.uint8, 64)[3] = 5
    assert array[3] == 5
    with pytest.raises(StateError, match="let go of it"):
        Memory.open(token)


def test_a_file_that_took_the_number_of_one_that_was_closed_is_not_taken_for_it():
    memory = Memory(4096)
    token = memory.token
    memory.close()
    with tempfile.TemporaryFile() as other:
        other.truncate(4096)
        stale = Token(f"/proc/self/fd/{other.fileno()}", token.size, token.inode)
        with pytest.raises(StateError, match="is gone"):
            Memory.open(stale)


def test_what_one_process_forgets_is_not_closed_for_another(kind):
    memory = Memory(64)
    with multiprocessing.get_context("fork").Pool(1) as pool:
        pool.apply(gc.collect)
    del pool
    gc.collect()
    Memory.open(memory.token)


def test_a_named_file_is_for_its_owner_alone_and_removed_with_it(monkeypatch, tmp_path):
    monkeypatch.delattr(os, "memfd_create", raising=False)
    monkeypatch.setattr(memories, "_folder", lambda size: tmp_path)
    memory = Memory(64)
    [name] = os.listdir(tmp_path)
    assert len(name) > 32
    assert stat.S_IMODE(os.stat(tmp_path / name).st_mode) == 0o600
    del memory
    gc.collect()
    assert os.listdir(tmp_path) == []


def test_a_named_file_is_removed_when_its_process_ends_and_not_by_a_fork_of_it(tmp_path):
    code = (
        "import os, sys; del os.memfd_create\n"
        "from pathlib import Path; from salience import memory; memory._folder = lambda size: Path(sys.argv[1])\n"
        "one = memory.Memory(64)\n"
        "if os.fork() == 0: one.close(); os._exit(0)\n"
        "os.wait(); assert len(os.listdir(sys.argv[1])) == 1"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code, str(tmp_path)], check=True)
    assert os.listdir(tmp_path) == []


def test_memory_without_a_name_is_for_its_owner_alone():
    memory = Memory(64)
    assert os.stat(memory.token.path).st_mode & 0o777 == 0o600


def test_a_link_is_not_followed(tmp_path):
    (tmp_path / "data").write_bytes(bytes(4096))
    (tmp_path / "link").symlink_to(tmp_path / "data")
    with pytest.raises(StateError, match="cannot be opened"):
        Memory.open(Token(str(tmp_path / "link"), 64, os.stat(tmp_path / "data").st_ino))


def test_where_no_memory_can_be_had_one_sentence_says_so(monkeypatch, tmp_path):
    monkeypatch.delattr(os, "memfd_create", raising=False)
    monkeypatch.setattr(memories, "_folder", lambda size: tmp_path / "missing")
    with pytest.raises(StateError, match="set TMPDIR to a folder that can be written to"):
        Memory(64)
    monkeypatch.undo()
    with pytest.raises(StateError, match="bytes of shared memory cannot be allocated"):
        Memory(1 << 62)


def test_a_single_process_has_memory_of_its_own():
    assert node_memory(None, 5).array(np.uint8, 5).tolist() == [0] * 5


def sequence(memory: Memory, count: int) -> None:
    numbers = memory.array(np.int64, 2)
    for k in range(1, count + 1):
        numbers[0] = k
        fence()
        numbers[1] = k


def test_the_data_of_a_flag_that_is_seen_are_seen_too(monkeypatch):
    """With the barrier of processors that need one, also on those that do not."""
    monkeypatch.setattr(memories, "STORES_IN_ORDER", False)
    memory, count = Memory(16), 20_000
    other = multiprocessing.get_context("fork").Process(target=sequence, args=(memory, count))
    other.start()
    numbers = memory.array(np.int64, 2)
    behind = flag = 0
    while flag < count:
        assert other.is_alive() or numbers[1] == count
        flag = int(numbers[1])
        fence()
        behind += int(numbers[0]) < flag
    other.join()
    assert behind == 0


FORKS = """
import multiprocessing, threading
from salience import memory

memory.STORES_IN_ORDER = False
stop = threading.Event()


def fences():
    while not stop.is_set():
        memory.fence()


thread = threading.Thread(target=fences)
thread.start()
for _ in range(20):
    other = multiprocessing.get_context("fork").Process(target=memory.fence)
    other.start()
    other.join(30)
    assert other.exitcode == 0, other.exitcode
stop.set()
"""


def test_a_fence_does_not_wait_for_a_thread_that_a_fork_left_behind():
    # In an interpreter of its own: what other tests have loaded may not survive a fork.
    ran = subprocess.run([sys.executable, "-c", FORKS], capture_output=True, text=True, timeout=300)
    assert (ran.returncode, ran.stderr) == (0, "")
