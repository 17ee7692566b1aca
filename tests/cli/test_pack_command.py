"""`salience pack` as a user runs it: a kill loses nothing, tools read what it wrote, bad input is one sentence."""

from __future__ import annotations

import fcntl
import resource
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
from folders import COMMAND, salience

from salience.cli import main
from salience.errors import ConfigError
from salience.feed.index import FILE, Index
from salience.feed.sizes import parse_bytes as parse_size

ARGS = ("--shard-size", "64KiB", "--jobs", "2")


def make_folder(root: Path, n: int = 30, size: int = 3000) -> Path:
    for i in range(n):
        (root / f"c{i % 3}").mkdir(parents=True, exist_ok=True)
        (root / f"c{i % 3}" / f"{i:05}.jpg").write_bytes(bytes([i % 256]) * size)
    return root


def shards(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in out.iterdir()}


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_killed_run_goes_on_to_the_very_shards_of_one_that_was_not(place: Path):
    make_folder(place / "data", n=900)
    assert main(["pack", "data", "whole", *ARGS]) == 0
    with subprocess.Popen([COMMAND, "pack", "data", "out", *ARGS], stdout=subprocess.DEVNULL) as running:
        while not (place / "out" / "shard-000004.tar").exists():
            assert running.poll() is None
            time.sleep(0.001)
        running.kill()
    assert running.returncode == -signal.SIGKILL
    assert not (place / "out" / FILE).exists()
    kept = {path.name: path.stat().st_ino for path in (place / "out").glob("*.tar")}
    done = salience("pack", "data", "out", *ARGS, cwd=place)
    assert (done.returncode, done.stderr) == (0, "")
    assert shards(place / "out") == shards(place / "whole")
    assert all((place / "out" / name).stat().st_ino == node for name, node in kept.items())


def test_tar_lists_what_was_packed_and_a_check_says_so(capsys: pytest.CaptureFixture[str], place: Path):
    make_folder(place / "data")
    assert main(["pack", "data", "out", *ARGS]) == 0
    assert "30 samples of 3 classes, 87.9 KiB, 3 shards in out." in capsys.readouterr().out
    assert main(["pack", "--check", "out"]) == 0
    assert "All is as the index says: 30 samples" in capsys.readouterr().out
    tar = shutil.which("tar")
    assert tar
    listed = [
        line
        for path in sorted((place / "out").glob("*.tar"))
        for line in subprocess.run([tar, "tf", path], check=True, capture_output=True, text=True).stdout.split()
    ]
    index = Index.load(place / "out" / FILE)
    assert listed[::2] == [index.names[i] for i in range(30)]
    assert listed[1::2] == [name.replace(".jpg", ".cls") for name in listed[::2]]
    (place / "out" / "shard-000001.tar").unlink()
    assert main(["pack", "--check", "out"]) == 1
    assert "shard-000001.tar is missing." in capsys.readouterr().out


def test_shards_of_others_get_an_index_once(capsys: pytest.CaptureFixture[str], place: Path):
    make_folder(place / "data")
    tar = shutil.which("tar")
    assert tar
    (place / "shards").mkdir()
    subprocess.run([tar, "cf", place / "shards" / "all.tar", "-C", place / "data", "."], check=True)
    assert main(["pack", "--index-only", "shards", "--no-checksums"]) == 0
    said = capsys.readouterr().out
    assert "30 samples of 3 classes, 87.9 KiB, 1 shards in shards. 4 entries are no samples" in said
    assert main(["pack", "--check", "shards"]) == 0
    assert "0 checksums fit, the others are not known" in capsys.readouterr().out
    assert main(["pack", "--index-only", "shards"]) == 2
    assert "remove it to make it again" in capsys.readouterr().err


def test_a_full_disk_is_one_sentence_and_the_next_run_goes_on(place: Path):
    make_folder(place / "data")
    full = subprocess.run(  # a limit on the size of files fails the same write, with another reason
        [COMMAND, "pack", "data", "out", *ARGS],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, resource.RLIM_INFINITY)),
        capture_output=True,
        text=True,
    )
    assert full.returncode == 2
    assert "cannot be written: File too large; make room, then run the same command again" in full.stderr
    assert full.stderr.count("\n") == 1
    assert main(["pack", "data", "out", *ARGS]) == 0
    assert main(["pack", "--check", "out"]) == 0


def test_a_second_pack_into_the_same_folder_is_refused(capsys: pytest.CaptureFixture[str], place: Path):
    make_folder(place / "data")
    assert main(["pack", "data", "out", *ARGS]) == 0
    with (place / "out" / "pack.json").open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert main(["pack", "data", "out", *ARGS]) == 2
    assert "Another pack is writing to" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["data"], "pack takes DIR and OUT"),
        ([], "pack takes DIR and OUT"),
        (["data", "out", "--check", "out"], "pack takes DIR and OUT"),
        (["data", "out", "--no-checksums"], "goes with --index-only"),
        (["data", "out", "--shard-size", "many"], "'many' is not a size"),
        (["data", "out", "--jobs", "0"], "--jobs is 0"),
        (["data", "out", "--shuffle-seed", "-1"], "shuffle seed is -1"),
        (["data", "data/out"], "is inside"),
        (["nothing", "out"], "There is no folder"),
        (["--check", "nothing"], "There is no byte index"),
        (["--index-only", "nothing"], "There is no folder"),
    ],
)
def test_bad_input_is_one_sentence(given: list[str], said: str, capsys: pytest.CaptureFixture[str], place: Path):
    make_folder(place / "data", n=3)
    assert main(["pack", *given]) == 2
    told = capsys.readouterr().err
    assert said in told
    assert told.count("\n") == 1


def test_sizes_are_read_in_both_kinds_of_units():
    assert [parse_size(text) for text in ("64MiB", "1.5 gb", "1000", "2KiB")] == [64 << 20, 1_500_000_000, 1000, 2048]
    with pytest.raises(ConfigError, match="64MiB"):
        parse_size("-1MiB")
