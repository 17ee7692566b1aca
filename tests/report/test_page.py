"""The page is one well-formed file that loads nothing, whatever stands in the data, however long the run."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest
from browser import Browser
from runs import NASTY, long_log, trained

from salience.cli import main
from salience.cli.opening import open_run
from salience.errors import MissingExtra
from salience.events import EventLog
from salience.report.compared import against, compare
from salience.report.html import comparison_page, page
from salience.report.reader import read_log, story_of
from salience.report.text import sections
from salience.report.words import percent

from conftest import require

VOID = {"meta", "img", "br", "link", "input", "hr"}
SECTIONS = (
    "verdict",
    "baseline",
    "result",
    "time",
    "selected",
    "filters",
    "copies",
    "hard",
    "warnings",
    "settings",
)


class Checked(HTMLParser):
    """Every tag that is opened is closed in its turn; tags, attributes and text are kept."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs on the same data, a nasty warning in the log of one, and their pages."""
    folder = tmp_path_factory.mktemp("runs")
    trained(folder, "all", epochs=5)
    trained(folder, "less", select="default", epochs=10)
    EventLog(folder / "less" / "run.jsonl").emit("warning", text="</style></section><script>alert(3)</script>")
    less, everything = str(folder / "less"), str(folder / "all")
    assert main(["report", less, "--baseline", everything, "-o", str(folder / "report.html")]) == 0
    assert main(["compare", everything, less, "-o", str(folder / "compare.html")]) == 0
    (folder / "long.html").write_text(page(story_of(read_log(long_log(folder / "long.jsonl", 500)), name="long")))
    return folder


@pytest.mark.parametrize("name", ["report.html", "compare.html", "long.html"])
def test_a_page_is_well_formed_and_asks_for_nothing(folder, name):
    text = (folder / name).read_text()
    found = Checked(text)
    assert not {"script", "link", "iframe", "object", "base", "form"} & set(found.tags)
    assert not [key for key, _ in found.attributes if key.startswith("on")]
    addresses = [value for key, value in found.attributes if key in ("src", "href", "xlink:href", "srcset", "action")]
    assert all(value.startswith("data:image/") for value in addresses)
    assert not re.search(r"url\(|@import|https?:", text)
    assert "default-src 'none'" in text


def test_names_and_texts_of_the_data_stay_text(folder):
    text = (folder / "report.html").read_text()
    assert "<script" not in text
    assert "<b>again" not in text
    shown = Checked(text).text
    assert all(name in shown for name in NASTY)
    assert "</style></section><script>alert(3)</script>" in shown


def test_every_section_with_something_in_it_is_there_the_verdict_first(folder):
    text = (folder / "report.html").read_text()
    found = re.findall(r'<section id="(\w+)"', text)
    assert found[0] == "verdict"
    assert set(SECTIONS) <= set(found)
    assert "broken" not in found
    assert 0 < text.count("<img ") <= 60


@pytest.mark.parametrize("epochs", [1, 2, 500])
def test_a_run_of_any_length_has_its_page(tmp_path, epochs):
    story = story_of(read_log(long_log(tmp_path / "x.jsonl", epochs)), name="x")
    found = Checked(page(story, baseline=against(story, story)))
    assert found.tags.count("svg") == 7
    assert f"{500 * epochs:,} of {1000 * epochs:,}" in found.text


def test_where_the_time_went_and_what_was_decided_is_told(tmp_path):
    text = page(story_of(read_log(long_log(tmp_path / "x.jsonl", 4)), name="x"))
    assert re.findall(r'<section id="(\w+)"', text).count("decisions") == 1
    found = Checked(text).text
    assert "Input-bound: <i>so</i> it is." in found
    assert all(
        part in found
        for part in ("Seconds of the loop", "waiting for batches", "Seconds to make the batches", "<b>burn")
    )
    assert "1.60x" in found
    assert "1.20x and 2.00x" in found  # what the lever could gain
    assert "1.50x (1.40 to 1.61)" in found
    assert "Share visited, by importance" in found
    assert "least important tenth" in found


def test_without_a_verdict_the_seconds_say_where_the_time_went(folder):
    story = open_run(str(folder / "all"), whole=False).story
    assert 0 < story.waiting < 1
    assert "load" in story.work
    assert f"The loop spent {percent(story.waiting)} of its time waiting for batches." in sections(story)["time"]
    assert re.search(r"of the time to make them went into (load|fetch|decode)\.", sections(story)["time"])


def test_reasons_that_differ_in_numbers_alone_are_one_row(tmp_path):
    text = page(story_of(read_log(long_log(tmp_path / "x.jsonl", 30)), name="x"))
    assert len(re.findall(r'<th scope="row">filter_\d', text)) == 2
    assert "1 to 30" in text


def test_many_runs_are_compared_on_one_page(tmp_path):
    stories = [story_of(read_log(long_log(tmp_path / f"{i}.jsonl", i + 1)), name=f"run {i}") for i in range(9)]
    found = Checked(comparison_page(compare(stories)))
    assert found.text.count("against run 0") == 8


def test_without_jinja2_the_extra_is_named(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(MissingExtra, match=r"pip install 'salience\[report\]'"):
        page(open_run(str(folder / "less"), whole=False).story)


# ---------------------------------------------------------------- in a real browser


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    require(program is not None, "chromium")
    started = Browser(str(program), tmp_path_factory.mktemp("browser"))
    yield started
    started.close()


HIDDEN = """[...document.querySelectorAll('section, svg, figcaption, h2, summary')].filter(e => {
    const box = e.getBoundingClientRect();
    return box.width < 20 || box.height < 10 || getComputedStyle(e).visibility != 'visible';
}).map(e => e.tagName + '#' + e.id)"""
UNSEEN = (
    "[...document.images].filter(i => !i.complete || !i.naturalWidth || i.getBoundingClientRect().width < 20).length"
)
OPEN_ALL = "document.querySelectorAll('details').forEach(d => d.open = true)"
COLOURS = "[document.body, document.querySelector('.verdict')].map(e => getComputedStyle(e).backgroundColor).join()"


def test_in_a_browser_everything_is_seen_on_a_phone_and_a_desk_by_day_and_night(folder, browser, tmp_path):
    colours = set()
    for width, name, dark in (
        (390, "report.html", False), (1280, "report.html", True), (390, "compare.html", True), (390, "long.html", False),
        (1280, "compare.html", False),
    ):  # fmt: skip
        browser.open(folder / name, width=width, dark=dark)
        assert browser.complaints() == []
        assert browser.requests() == [(folder / name).as_uri()]
        assert browser.ask(HIDDEN) == []
        assert browser.ask(UNSEEN) == 0
        assert browser.ask("document.documentElement.scrollWidth") <= width
        browser.ask(OPEN_ALL)
        assert browser.ask("document.documentElement.scrollWidth") <= width
        colours.add((dark, browser.ask(COLOURS)))
        assert browser.picture(tmp_path / "page.png").stat().st_size > 10_000
    assert len(colours) == len({colour for _, colour in colours}) == 2
