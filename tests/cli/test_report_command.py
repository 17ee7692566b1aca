"""`salience report` and `salience compare`: what they say, what they write, and how they refuse."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from folders import photos
from PIL import Image

from salience import Source
from salience import ledger as ledgers
from salience.cli import main
from salience.cli.pictures import MAX_PNG_PIXELS, MAX_SIDE_PIXELS, encoded, pictures
from salience.errors import DataError


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that observed, one that selected, and the data of both."""
    folder = tmp_path_factory.mktemp("runs")
    photos(folder / "data")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        for name, more in (("all", []), ("less", ["--select", "uniform"])):
            given = ["--data", folder / "data", "--model", "mlp", "--epochs", 2, "--batch-size", 8, "--workers", 0]
            assert main(["train", *map(str, given), *more, "--out", str(folder / name)]) == 0
    return folder


@pytest.fixture(autouse=True)
def place(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(runs / "cache"))
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    return tmp_path


def refusal(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    """What a command that fails says: one line."""
    assert main([str(word) for word in words]) == 2
    said = capsys.readouterr()
    assert len(said.err.splitlines()) == 1
    return said.err


def test_a_run_is_told_in_a_few_sentences_and_as_a_page_with_pictures(runs, capsys):
    assert main(["report", str(runs / "all")]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("mlp reached a test accuracy of ")
    assert said[-1].endswith("add -o report.html.")
    assert main(["report", str(runs / "all" / "run.jsonl"), "-o", "report.html"]) == 0
    text = Path("report.html").read_text()
    assert said[0] in text.replace("&#39;", "'")
    assert f"with {text.count('data:image/png;base64,')} pictures" in capsys.readouterr().out
    assert list(Path().iterdir()) == [Path("report.html")]


def test_a_baseline_is_set_beside_it(runs, capsys):
    assert main(["report", str(runs / "less"), "--baseline", str(runs / "all"), "-o", "report.html"]) == 0
    said = capsys.readouterr().out
    assert "less against all: Accuracy " in said
    assert "one pair of runs" in said
    assert "<h2>Against the baseline</h2>" in Path("report.html").read_text()


def test_a_log_alone_has_its_page_without_pictures(runs, capsys):
    Path("mine.jsonl").write_bytes((runs / "all" / "run.jsonl").read_bytes())
    assert main(["report", "mine.jsonl", "-o", "report.html"]) == 0
    text = Path("report.html").read_text()
    assert "<h1>mine</h1>" in text
    assert "Class by class" in text  # what is known of samples is in the log
    assert "<img" not in text
    given = ["--ledger", str(runs / "all" / "ledger.npz"), "--data", str(runs / "data")]
    assert main(["report", "mine.jsonl", *given, "-o", "report.html"]) == 0
    assert "<img" in Path("report.html").read_text()


def test_data_that_is_gone_is_said_and_data_that_is_wrong_refused(runs, place, capsys):
    photos(place / "other", 24)
    assert "is not the data of this run: it has 20 samples, the run 44." in refusal(
        capsys, "report", runs / "all", "-o", "report.html", "--data", "other"
    )
    assert not Path("report.html").exists()
    (runs / "data").rename(runs / "moved")
    try:
        assert main(["report", str(runs / "all"), "-o", "report.html"]) == 0
        said = capsys.readouterr().out
        assert "No pictures: " in said
        assert "there is no file or folder" in said
        assert main(["report", str(runs / "all"), "-o", "report.html", "--data", str(runs / "moved")]) == 0
        assert "<img" in Path("report.html").read_text()
    finally:
        (runs / "moved").rename(runs / "data")


def test_images_in_another_order_are_not_taken_for_the_runs(runs):
    ledger = ledgers.load(runs / "all" / "ledger.npz")
    assert set(pictures(str(runs / "data"), [0, 5], ledger)) == {0, 5}
    ledger.label[:] = ledger.label[::-1].copy()
    with pytest.raises(DataError, match="its classes are others"):
        pictures(str(runs / "data"), [0], ledger)


def test_samples_of_a_source_have_their_pictures_and_broken_ones_none(place):
    pytest.importorskip("obstore")
    source = Source(str(photos(place / "photos")))
    ledger = ledgers.Ledger(len(source))  # all 48: none are held out
    ledger.set_labels(source.labels)
    (place / "photos" / source.names[1]).write_bytes(b"no image")
    made = pictures(str(place / "photos"), [0, 1, 47], ledger)
    assert set(made) == {0, 47}
    with Image.open(io.BytesIO(made[47])) as image:
        assert image.size == (MAX_SIDE_PIXELS, MAX_SIDE_PIXELS)


def test_a_damaged_ledger_is_left_out_with_a_word(runs, place, capsys):
    (place / "run").mkdir()
    for name in ("run.jsonl", "last.pt"):
        (place / "run" / name).write_bytes((runs / "all" / name).read_bytes())
    (place / "run" / "ledger.npz").write_bytes(b"PK")
    assert main(["report", "run"]) == 0
    assert "ledger.npz' is damaged or not a ledger" in capsys.readouterr().out
    assert "There is no ledger at" in refusal(capsys, "report", "run", "--ledger", "none.npz")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("report", "nowhere"), "There is no event log at 'nowhere'"),
        (("report", "."), "There is no event log at 'run.jsonl'"),
        (("report", "{all}", "-o", "report.txt"), "choose a name that ends in .html"),
        (("report", "{all}", "-o", "no/where.html"), "cannot be written: No such file or directory"),
        (("report", "{all}", "--baseline", "nowhere"), "There is no event log at 'nowhere'"),
        (("compare", "{all}"), "name two or more different runs"),
        (("compare", "{all}", "{all}"), "name two or more different runs"),
        (("compare", "{all}", "nowhere"), "There is no event log at 'nowhere'"),
    ],
)
def test_bad_input_gets_one_clear_sentence(runs, words, said, capsys):
    assert said in refusal(capsys, *(word.format(all=runs / "all") for word in words))


def test_runs_are_compared_in_a_table_and_on_a_page(runs, capsys):
    assert main(["compare", str(runs / "all"), str(runs / "less"), "-o", "compare.html"]) == 0
    said = capsys.readouterr().out
    assert "less against all: Accuracy " in said
    assert [line.split()[0] for line in said.splitlines()[3:5]] == ["all", "less"]
    assert "<h1>all · less</h1>" in Path("compare.html").read_text()


@pytest.mark.parametrize(("side", "kind"), [(MAX_PNG_PIXELS, b"\x89PNG"), (3 * MAX_SIDE_PIXELS, b"\xff\xd8")])
def test_a_picture_is_small(side, kind):
    pixels = np.random.default_rng(0).integers(0, 256, (3, side, side), dtype=np.uint8)
    made = encoded(pixels)
    assert made.startswith(kind)
    assert len(made) < 12_000
