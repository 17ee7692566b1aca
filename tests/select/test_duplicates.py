"""Near-duplicate documents by MinHash."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import salience
from salience.errors import ConfigError, DataError
from salience.select.duplicates import DOCUMENTS_TOGETHER, SHINGLE, near_duplicates, signatures

ENDS = ("n", "m", "rk", "st", "")
WORDS = [f"{a}{b}{c}" for a in ("ka", "lo", "mi", "tu") for b in ("ra", "ste", "pen", "dil") for c in ENDS]


def texts(n, seed=0, words=40):
    rng = np.random.default_rng(seed)
    return [" ".join(rng.choice(WORDS, words)) for _ in range(n)]


def jaccard(one: str, other: str) -> float:
    a, b = ({text[i : i + SHINGLE] for i in range(len(text) - SHINGLE + 1)} for text in (one, other))
    return len(a & b) / len(a | b)


def changed(text: str, words: int, rng) -> str:
    parts = text.split()
    for at in rng.choice(len(parts), words, replace=False):
        parts[at] = "CHANGED"
    return " ".join(parts)


def test_documents_with_a_word_changed_are_found_and_others_are_not():
    rng = np.random.default_rng(1)
    originals = texts(300)
    found = near_duplicates([*originals, *(changed(text, 1, rng) for text in originals[:100])])
    for i in range(100):
        assert found.group[i] == found.group[300 + i] >= 0
        assert found.similarity[i] >= 0.7
    assert (found.group[100:300] == -1).all()
    assert (found.similarity[100:300] == 0).all()


@pytest.mark.parametrize("words", [8, 40, 200])
def test_agreement_of_signatures_estimates_jaccard_similarity(words):
    rng = np.random.default_rng(2)
    pairs = [(text, changed(text, max(1, words // 20), rng)) for text in texts(200, 3, words)]
    signature = signatures([text for pair in pairs for text in pair])
    estimated = (signature[::2] == signature[1::2]).mean(axis=1)
    wanted = np.array([jaccard(*pair) for pair in pairs])
    assert abs(estimated.mean() - wanted.mean()) < 0.02
    assert np.abs(estimated - wanted).mean() < 0.08


def test_equal_texts_of_any_length_are_copies_and_empty_ones_of_nothing():
    found = near_duplicates(["", "", "a", "a", "b", b"a", "short", "short", "\ud800", "a" * 1_000, "a" * 900])
    assert found.group.tolist() == [-1, -1, 2, 2, -1, 2, 6, 6, -1, 9, 9]


def test_groups_are_transitive_and_large_ones_are_found():
    base = texts(1, 5, 60)[0]
    rng = np.random.default_rng(6)
    found = near_duplicates([*(changed(base, 1, rng) for _ in range(200)), *texts(50, 7, 60)])
    assert len(set(found.group[:200].tolist())) == 1
    assert (found.group[200:] == -1).all()


def test_documents_are_hashed_alike_whatever_group_they_are_hashed_in():
    some = texts(DOCUMENTS_TOGETHER // 64 * 64 + 10, 8, 3)
    whole = signatures(some)
    np.testing.assert_array_equal(signatures(some[-20:]), whole[-20:])
    assert len(signatures([])) == 0
    assert len(near_duplicates([]).group) == 0


def test_a_loader_names_them_and_visits_one_of_each_group():
    originals = texts(60)
    documents = [*originals, *originals[:20]]
    copies = near_duplicates(documents)
    data = [(i, i % 3) for i in range(80)]
    loader = salience.Loader(data, 10, epochs=6, copies=copies, select="default", with_ids=True)
    selecting = []
    for _ in range(6):
        for ids, (x, y) in loader:
            loader.loss(torch.rand(len(x)), torch.randn(len(x), 3), y, ids=ids)
        selecting += [set(loader.plan.ids.tolist())] * (len(loader.plan) < 60)
    assert len(selecting) >= 2
    assert not any(i in visited and i + 60 in visited for i in range(20) for visited in selecting)
    assert loader.copies.group[0] == loader.copies.group[60]


def test_an_observing_loader_has_them_in_its_findings():
    data = [(i, i % 3) for i in range(80)]
    loader = salience.Loader(data, 10, copies=near_duplicates([*texts(60), *texts(20)]))
    for x, y in loader:
        loader.loss(torch.rand(len(x)), torch.randn(len(x), 3), y)
    loader.report()
    (found,) = [event for event in loader.events.recent if event.kind == "findings"]
    assert (found["groups"], found["spare"]) == (20, 20)


def test_bad_input_is_one_sentence():
    with pytest.raises(DataError, match="given a int; pass texts"):
        near_duplicates([3])
    with pytest.raises(ConfigError, match="threshold is 2"):
        near_duplicates(["a"], threshold=2)
    with pytest.raises(ConfigError, match="copies= is about 2 samples, and the data set has 3"):
        salience.Loader([1, 2, 3], copies=near_duplicates(["a", "b"]))
