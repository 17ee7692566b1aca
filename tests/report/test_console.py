"""What is printed on a real terminal (a pty), with rich: names never steer it."""

from __future__ import annotations

import importlib.util
import os
import pty
import subprocess
import sys

import pytest

from salience.errors import printable
from salience.report.console import table

from conftest import require

NASTY = "\x1b]0;owned\x07\x9b31m\u202ereversed"
SHOW = f"""
from salience.report.console import bars, say, table
nasty = {NASTY!r}
say(nasty)
table(nasty, ("name", "value"), [(nasty + "[/red]", "1")])
with bars() as shown:
    shown.update(nasty, 1, 1, nasty + "[bold]")
"""


def test_names_do_not_steer_a_terminal_in_lines_tables_and_progress_bars():
    require(importlib.util.find_spec("rich") is not None, "rich")
    ours, theirs = pty.openpty()
    env = {**os.environ, "TERM": "xterm", "COLUMNS": "200"}
    with subprocess.Popen([sys.executable, "-c", SHOW], stdout=theirs, stderr=theirs, env=env) as child:
        os.close(theirs)
        said = b""
        while more := read(ours):
            said += more
    os.close(ours)
    assert child.returncode == 0, said.decode(errors="replace")
    shown = said.decode()
    assert shown.count("\\x1b]0;owned\\x07\\x9b31m\\u202ereversed") >= 4
    assert "[/red]" in shown
    assert "[bold]" in shown
    assert not {"\x07", "\x9b", "\u202e"} & set(shown)
    assert "\x1b]0" not in shown


def read(end: int) -> bytes:
    """What the other end has written; nothing once it is closed."""
    try:
        return os.read(end, 1 << 16)
    except OSError:
        return b""


def test_without_a_terminal_a_table_is_plain_lines(capsys):
    table(f"about {NASTY}", ("name", "n"), [("a", "1"), ("bb", "22")])
    said = capsys.readouterr().out
    assert said.splitlines()[1:] == ["  name   n", "  ----  --", "  a      1", "  bb    22"]
    assert said.startswith("about \\x1b]0;owned")


@pytest.mark.parametrize(("text", "shown"), [("a\tb\nc", "a\tb\nc"), ("\udcff", "\\udcff"), ("naïve 猫", "naïve 猫")])
def test_what_is_plain_text_stays_as_it_is(text, shown):
    assert printable(text) == shown
