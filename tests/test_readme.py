"""The pages keep their word: every code block runs, every command parses, every plug-in and public name has its text."""

from __future__ import annotations

import importlib.util
import inspect
import re
import shlex
import socket
import textwrap
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import salience
from salience.cli import parse
from salience.config import read_toml, train_config
from salience.registry import BUILT_IN, find
from salience.run import resolve
from salience.select import PRESETS, Pipeline

from conftest import make_model, require

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").rglob("*.md"))]


class Block(NamedTuple):
    page: Path
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"


def blocks(*languages: str) -> list[Block]:
    found = []
    for page in PAGES:
        text = page.read_text()
        for match in re.finditer(r"^```(\w+)\n(.*?)^```$", text, flags=re.M | re.S):
            line = text.count("\n", 0, match.start()) + 1
            found.append(Block(page, line, match[1], match[2]))
    return [block for block in found if block.language in languages]


def section(page: str, title: str) -> str:
    """The text below one heading, up to the next of its rank or higher."""
    text = (ROOT / page).read_text()
    head = re.search(rf"^(#+) {re.escape(title)}$", text, flags=re.M)
    assert head, f"{page} has no heading {title!r}"
    rest = text[head.end() :]
    end = re.search(rf"^#{{1,{len(head[1])}}} ", rest, flags=re.M)
    return rest[: end.start()] if end else rest


class Words(nn.Module):
    """A language model: logits of the next token, [B, T, vocabulary]."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 6), nn.Linear(6, 11)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(tokens))


def stand_ins(problem: TensorDataset) -> dict[str, Any]:
    """What a block may take for granted: a small data set of each sort, a model for it, an optimizer."""
    g = torch.Generator().manual_seed(0)
    x, y = problem.tensors
    few = x[:60]
    tokens = torch.randint(1, 11, (60, 9), generator=g)
    tokens[:20, 6:] = 0
    names: dict[str, Any] = {
        "torch": torch, "F": F, "nn": nn, "salience": salience,
        "train_set": problem, "x": x, "y": y, "model": make_model(),
        "regression_set": TensorDataset(few, few.sum(1)), "regressor": nn.Linear(8, 1),
        "mask_set": TensorDataset(torch.randn(60, 3, 6, 6, generator=g), torch.randint(0, 5, (60, 6, 6), generator=g)),
        "segmenter": nn.Conv2d(3, 5, 1),
        "text_set": TensorDataset(tokens), "language_model": Words(), "PAD": 0,
        "docs": [row[: int((row > 0).sum())] for row in tokens],
        "pad": lambda documents: nn.utils.rnn.pad_sequence(documents, batch_first=True),
        "tag_set": TensorDataset(few, (few[:, :5] > 0).float()), "tagger": nn.Linear(8, 5),
        "soft_set": TensorDataset(few, torch.rand(60, 4, generator=g).softmax(1)),
    }  # fmt: skip
    models = [value for value in names.values() if isinstance(value, nn.Module)]
    names["optimizer"] = torch.optim.SGD([p for model in models for p in model.parameters()], lr=0.05)
    return names


@pytest.fixture
def one_rank(monkeypatch):
    """What torchrun would set, for a single process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for name, value in {**settings, "GLOO_SOCKET_IFNAME": "lo"}.items():
        monkeypatch.setenv(name, value)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize("block", blocks("python"), ids=str)
@pytest.mark.filterwarnings("ignore:.*does not have many workers", "ignore:.*LeafSpec")  # Lightning's own
def test_python_blocks_run(block, problem, tmp_path, monkeypatch, request):
    if "init_process_group" in block.text:
        request.getfixturevalue("one_rank")
    for package in {"lightning", "transformers", "accelerate", "datasets", "ray"} & set(re.findall(r"\w+", block.text)):
        require(importlib.util.find_spec(package) is not None, package)
    if "glyphs" in block.text:
        require(importlib.util.find_spec("PIL") is not None, "Pillow")
    monkeypatch.chdir(tmp_path)
    for settings in blocks("toml"):
        if settings.page == block.page:
            Path(_file_name(settings)).write_text(settings.text)
    code = "\n" * block.line + block.text  # so that a traceback names the line of the page
    exec(compile(code, str(block.page), "exec"), {"__name__": "page", **stand_ins(problem)})


def _file_name(block: Block) -> str:
    """A TOML block says in its first line what file it is."""
    name = re.match(r"# ([\w-]+\.toml)", block.text)
    assert name, f"{block}: the first line of a TOML block names its file: # mine.toml"
    return name[1]


@pytest.mark.parametrize("block", [b for b in blocks("toml") if "pyproject" not in b.text], ids=str)
def test_settings_files_are_accepted(block, tmp_path):
    path = tmp_path / _file_name(block)
    path.write_text(block.text)
    tables = read_toml(path)
    Pipeline(resolve(str(path)))
    train_config(tables.get("train", {}))


def commands() -> list[tuple[str, list[str]]]:
    lines = [(str(b), line) for b in blocks("sh") for line in textwrap.dedent(b.text).splitlines()]
    return [(where, shlex.split(line, comments=True)) for where, line in lines if line.strip()]


@pytest.mark.parametrize(("where", "words"), commands())
def test_commands_exist_with_their_options(where, words):
    if not words:
        return
    if words[0] == "salience":
        args, unknown = parse(words[1:])
        assert args.run
        assert not unknown
    elif words[0] == "make":
        makefile = (ROOT / "Makefile").read_text()
        assert all(re.search(rf"^{target}:", makefile, flags=re.M) for target in words[1:])
    elif words[0] == "python":
        assert (ROOT / words[1]).is_file()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target, _, anchor in (link.partition("#") for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text())):
        if "://" in target:
            continue
        place = page.parent / target if target else page
        assert place.exists(), f"{page.name} links to {target}, which is not there"
        assert not anchor or anchor in anchors(place), (
            f"{page.name} links to {target}#{anchor}, which has no such heading"
        )


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    heads = re.findall(r"^#+ (.+)$", page.read_text(), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", head).strip().lower().replace(" ", "-") for head in heads}


@pytest.mark.parametrize("kind", list(BUILT_IN))
def test_every_built_in_has_its_card(kind):
    cards = set(re.findall(r"^### `(\w+)`", section("docs/scores.md", kind.capitalize()), flags=re.M))
    assert cards == set(BUILT_IN[kind])


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind in BUILT_IN for name in BUILT_IN[kind]])
def test_a_card_names_every_option(kind, name):
    text = section("docs/scores.md", f"`{name}`")
    for option in inspect.signature(find(kind, name)).parameters.values():
        if option.kind is option.KEYWORD_ONLY:
            assert f"`{option.name}" in text, f"the card of {name} does not name the option {option.name}"


def test_the_table_of_the_default_is_what_the_preset_says():
    text = section("docs/selecting.md", "What `default` does")
    config = PRESETS["default"]
    for used in (*config.filters, *config.scores, config.sampler, config.keep):
        assert f"`{used.label}`" in text
        for option, value in used.options.items():
            assert f"`{option} = {value}`" in text, f"{used.label}: {option} = {value} is not in the table"
    order = [text.index(f"`{used.label}`") for used in config.filters]
    assert order == sorted(order), "the table lists the filters in another order"


def test_every_measured_figure_of_the_readme_is_in_the_results():
    table = section("README.md", "What to switch on, and what it gained")
    rows = [
        line.split("|")[3:5] for line in table.splitlines() if line.startswith("| ") and "your bottleneck" not in line
    ]
    figures = {figure for row in rows for figure in re.findall(r"[\d,]*\d\.\d+|\d{2,}(?!%)", " ".join(row))}
    results = (ROOT / "benchmarks" / "RESULTS.md").read_text()
    assert len(figures) > 20
    missing = sorted(figure for figure in figures if not re.search(rf"(?<![\d.]){re.escape(figure)}(?!\d)", results))
    assert not missing, f"the README has {missing}, which benchmarks/RESULTS.md has not"


@pytest.mark.parametrize("name", sorted(set(salience.__all__) - {"__version__"}))
def test_a_public_name_has_its_arguments_and_members_documented(name):
    what = getattr(salience, name)
    text = section("docs/api.md", f"`{name}`")
    if name == "Selector":  # shares what it has with the Loader
        text += section("docs/api.md", "`Loader`")
    if not (inspect.isclass(what) and issubclass(what, Exception)):
        for argument in inspect.signature(what).parameters:
            assert re.search(rf"\b{argument}\b", text), f"{name}: the argument {argument} is not documented"
    own = [c for c in getattr(what, "__mro__", ()) if c.__module__.startswith("salience.")]
    for member in {m for c in own for m in vars(c) if not m.startswith("_")}:
        assert re.search(rf"`{member}\b", text), f"{name}: {member} is not documented"


def test_what_the_pages_say_a_loader_has_it_has(problem):
    loader = salience.Loader(problem, 32)
    said = {name for page in PAGES for name in re.findall(r"`loader\.(?!py`)(\w+)", page.read_text())}
    for line in re.findall(r"^- (`[^:]+):", section("docs/api.md", "`Loader`"), flags=re.M):
        said |= set(re.findall(r"`(\w+)[`(]", line)) - {"len"}
    assert {"loss", "progress", "events", "visits_expected"} <= said
    missing = sorted(name for name in said if not hasattr(loader, name))
    assert not missing, f"the pages name {missing}, which a Loader has not"
