"""Helper processes talk, hand their errors over, and are never left behind."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import pytest

from salience.child import Child, Lost


def echo(pipe: Any, *more: Any) -> None:
    while (message := pipe.recv()) is not None:
        pipe.send((message, *more))


def fail(pipe: Any) -> None:
    pipe.recv()
    raise ValueError("the disk is full")


def leave(pipe: Any) -> None:
    pipe.recv()
    os._exit(3)


def finish(pipe: Any, path: str) -> None:
    """Writes something when it is told to end."""
    pipe.send("ready")
    assert pipe.recv() is None
    with open(path, "w") as file:
        file.write("finished")


def wait_until_gone(pid: int) -> None:
    """A hang ends the test by an error."""
    for _ in range(6000):
        try:
            with open(f"/proc/{pid}/stat") as file:
                if file.read().rpartition(")")[2].split()[0] == "Z":
                    return
        except FileNotFoundError:
            return
        time.sleep(0.01)
    raise AssertionError("the process is still there")


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_it_gets_its_arguments_and_answers(start):
    child = Child(echo, 7, name="helper", start=start)
    child.send("hello")
    assert child.receive() == ("hello", 7)
    assert child.alive
    child.close()
    child.close()
    assert not child.alive
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_an_exception_is_told_in_its_own_words(start):
    child = Child(fail, name="helper", start=start)
    child.send("go")
    with pytest.raises(Lost, match=r"^ValueError: the disk is full$"):
        child.receive()
    child.close()


def test_who_sends_to_a_process_that_failed_is_told_why():
    child = Child(fail, name="helper", start="fork")
    child.send("go")
    child.process.join(60)
    with pytest.raises(Lost, match="the disk is full"):
        child.send("more")
    child.close()


def test_a_death_without_words_is_told_by_its_code():
    child = Child(leave, name="helper", start="fork")
    child.send("go")
    with pytest.raises(Lost, match="its process ended with code 3"):
        child.receive()
    child.close()
    killed = Child(echo, name="helper", start="fork")
    os.kill(killed.process.pid, signal.SIGKILL)
    with pytest.raises(Lost, match="code -9"):
        killed.receive()
    killed.close()


def test_it_may_finish_within_its_time(tmp_path):
    child = Child(finish, str(tmp_path / "file"), name="helper", start="fork", farewell=60)
    assert child.receive() == "ready"
    child.close()
    assert (tmp_path / "file").read_text() == "finished"


def test_one_that_does_not_end_is_killed():
    child = Child(echo, name="helper", start="fork", farewell=0.01)
    pid = child.process.pid
    os.kill(pid, signal.SIGSTOP)
    child.close()
    wait_until_gone(pid)
    assert not multiprocessing.active_children()


def test_it_ends_with_the_last_who_holds_it():
    child = Child(echo, name="helper", start="fork")
    pid = child.process.pid
    del child
    gc.collect()
    wait_until_gone(pid)


def test_its_end_is_told_however_it_comes():
    told = threading.Event()
    child = Child(echo, name="helper", start="fork")
    child.on_end(told.set)
    os.kill(child.process.pid, signal.SIGKILL)
    assert told.wait(60)
    child.end()
    count: list[int] = []
    again = Child(echo, name="helper", start="fork")
    again.on_end(lambda: count.append(1))
    again.end()
    assert count == [1]


def in_a_fork(child: Child, out: Any) -> None:
    out.send((child.mine, child.alive))
    child.close()


def test_a_fork_neither_owns_nor_ends_it():
    child = Child(echo, name="helper", start="fork")
    here, there = multiprocessing.Pipe()
    other = multiprocessing.get_context("fork").Process(target=in_a_fork, args=(child, there))
    other.start()
    assert here.recv() == (False, False)
    other.join(60)
    child.send(1)
    assert child.receive() == (1,)
    child.close()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGUSR1])
def test_signals_to_the_whole_group_are_for_the_parent(number):
    child = Child(echo, name="helper", start="fork")
    child.send(0)
    child.receive()  # it has begun
    os.kill(child.process.pid, number)
    child.send(1)
    assert child.receive() == (1,)
    child.close()


SCRIPT = r"""
import os, time
from salience.child import Child

def idle(pipe):
    os.write(1, b"helper %d\n" % os.getpid())
    time.sleep(600)

child = Child(idle, name="helper", start="fork")
if os.fork() == 0:  # it holds a copy of the pipe, which therefore does not close
    os.write(1, b"fork %d\n" % os.getpid())
time.sleep(600)
"""


def test_it_ends_when_its_parent_is_killed_even_if_a_fork_holds_the_pipe(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    with subprocess.Popen([sys.executable, "-W", "ignore", script], stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        try:
            found = dict(run.stdout.readline().split() for _ in range(2))
        finally:
            run.kill()
    wait_until_gone(int(found["helper"]))
    os.kill(int(found["fork"]), signal.SIGKILL)


def test_a_script_without_a_guard_does_not_start_itself_again(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "from salience.child import Child, Lost\n"
        "def work(pipe): pass\n"
        "child = Child(work, name='helper', start='spawn')\n"
        "try:\n    child.receive()\nexcept Lost as lost:\n    print(lost)\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.count("if __name__ == '__main__'") == 1
