"""Near-copies are found by features that scatter less than samples differ, byte copies by fingerprints; one is visited."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset, Subset, TensorDataset

import salience
from salience.errors import ConfigError
from salience.ledger import Ledger
from salience.ledger.copies import Copies, both, byte_copies, connected
from salience.ledger.embeddings import Embeddings
from salience.select import Clock, View
from salience.select.neighbours import MAX_VECTORS_FOR_ALL_PAIRS, nearest
from salience.select.redundancy import CopySearch, chances, in_units_of_scatter, near_copies, pause, redundancy

ONCE = {"filters": ["redundancy"], "scores": [], "sampler": "uniform", "keep": 1.0}
EARLY = {**ONCE, "filters": [{"name": "redundancy", "visits": 3}]}


def clouds(n: int = 900, copies: int = 300, width: int = 48, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Vectors in five clouds, the last `copies` of them near-copies of others, and the origin of each."""
    rng = np.random.default_rng(seed)
    centre = rng.normal(0, 3, (5, width))
    x = centre[rng.integers(0, 5, n)] + rng.normal(0, 1, (n, width))
    origin = np.concatenate((np.arange(n), rng.integers(0, n, copies)))
    return np.concatenate((x, x[origin[n:]] + rng.normal(0, 0.1, (copies, width)))).astype(np.float32), origin


def found_of(group: np.ndarray, origin: np.ndarray) -> tuple[float, float]:
    """Recall and precision: shares a group with a true copy."""
    has = np.bincount(origin, minlength=len(origin))[origin] > 1
    pair = group.astype(np.int64) * len(origin) + origin
    _, place, times = np.unique(pair, return_inverse=True, return_counts=True)
    right = (group >= 0) & (times[place] > 1)
    return float(right[has].mean()), float(right[group >= 0].mean()) if (group >= 0).any() else 1.0


# ---------------------------------------------------------------- neighbours


def test_neighbours_are_those_of_comparing_every_pair():
    x = np.random.default_rng(0).normal(size=(400, 8)).astype(np.float32)
    distance, where = nearest(x, 5)
    apart = np.linalg.norm(x[:, None] - x[None], axis=2)
    np.fill_diagonal(apart, np.inf)
    np.testing.assert_array_equal(where, np.argsort(apart, axis=1)[:, :5])
    np.testing.assert_allclose(distance, np.sort(apart, axis=1)[:, :5], atol=1e-4)


def test_among_many_vectors_what_lies_much_closer_is_still_found(monkeypatch):
    monkeypatch.setattr("salience.select.neighbours.MAX_VECTORS_FOR_ALL_PAIRS", 100)
    x, origin = clouds(6000, 2000)
    distance, where = nearest(x, 12)
    assert (origin[where[6000:, 0]] == origin[6000:]).mean() > 0.99
    assert (np.diff(distance, axis=1) >= 0).all()
    assert all(len(set(row)) == 12 for row in where.tolist())
    assert not (where == np.arange(len(x))[:, None]).any()
    assert MAX_VECTORS_FOR_ALL_PAIRS > 1000


def test_fewer_vectors_than_neighbours_asked_for():
    distance, where = nearest(np.eye(3, dtype=np.float32), 5)
    assert (where[:, 2:] == -1).all()
    assert np.isinf(distance[:, 2:]).all()


# ---------------------------------------------------------------- features


def test_copies_are_found_and_others_are_not():
    x, origin = clouds()
    found = near_copies(Embeddings.given(x, len(x)), np.zeros(len(x), dtype=np.int32))
    recall, precision = found_of(found.group, origin)
    assert recall > 0.98
    assert precision > 0.98
    assert found.similarity[found.group >= 0].min() > 0.9
    assert (found.similarity[found.group < 0] == 0).all()


def test_without_copies_hardly_anything_is_grouped():
    x, _ = clouds(copies=0)
    found = near_copies(Embeddings.given(x, len(x)), np.zeros(len(x), dtype=np.int32))
    assert (found.group >= 0).mean() < 0.01


@pytest.mark.parametrize("width", [10, 60])
def test_neighbours_that_are_close_by_chance_are_not_taken_for_copies(width):
    x = np.random.default_rng(0).normal(size=(4000, width)).astype(np.float32)
    distance, _ = nearest(x, 12)
    chance, crowded = chances(distance)
    assert not crowded.any()
    for share in (0.1, 0.3):
        assert 0.3 * share < (chance[:, 0] < share).mean() < 1.2 * share
    group = near_copies(Embeddings.given(x, 4000), np.zeros(4000, dtype=np.int32)).group
    assert (group < 0).all()


def test_scatter_is_what_visits_do_and_telling_copies_is_easier_in_its_units():
    """Visits scatter widely in four directions and hardly in the others; copies differ in none of them."""
    x, origin = clouds(600, 200)
    rng = np.random.default_rng(1)
    wide = np.where(np.arange(x.shape[1]) < 4, 12.0, 0.3)
    kept = Embeddings(len(x), x.shape[1])
    for _ in range(6):
        order = rng.permutation(len(x))
        for ids in np.array_split(order, 8):
            kept.record(ids, (x[ids] + rng.normal(0, 1, (len(ids), x.shape[1])) * wide).astype(np.float32))
    assert (kept.visits == 6).all()
    deviation = np.sqrt(np.diag(kept.scatter) / kept.weight)
    np.testing.assert_allclose(deviation, wide, rtol=0.1)
    label = np.zeros(len(x), dtype=np.int32)
    plain = near_copies(Embeddings.given(kept.mean, len(x)), label)
    told = near_copies(kept, label)
    assert found_of(told.group, origin)[0] > 0.9
    assert found_of(plain.group, origin)[0] < 0.5
    assert in_units_of_scatter(kept).shape[1] <= x.shape[1]


def test_copies_with_different_labels_are_left_alone():
    x, _ = clouds()
    label = np.zeros(len(x), dtype=np.int32)
    label[900:] = 1
    group = near_copies(Embeddings.given(x, len(x)), label).group
    for number in np.unique(group[group >= 0]):
        assert len(set(label[group == number])) == 1


@pytest.mark.parametrize("wrong", [np.zeros((5, 3)), np.zeros(20), np.full((20, 3), np.nan), np.full((20, 3), "a")])
def test_embeddings_that_do_not_fit_are_refused(wrong):
    with pytest.raises(ConfigError, match="embeddings"):
        salience.Selector(20, epochs=3, select=ONCE, embeddings=wrong)


def test_embeddings_nobody_reads_are_refused():
    with pytest.raises(ConfigError, match="redundancy"):
        salience.Selector(20, epochs=3, select="el2n", embeddings=np.zeros((20, 2)))


# ---------------------------------------------------------------- groups


def test_groups_connect_through_others():
    group = connected(6, np.array([0, 2, 4]), np.array([2, 5, 4]))
    assert group.tolist() == [0, -1, 0, -1, -1, 0]


def test_byte_copies_share_fingerprint_and_label():
    prints = np.array([7, 7, 0, 0, 9, 7], dtype=np.int64)
    found = byte_copies(prints, np.array([1, 1, 1, 1, 1, 2], dtype=np.int32))
    assert found.group.tolist() == [0, 0, -1, -1, -1, -1]
    assert found.similarity.tolist() == [1, 1, 0, 0, 0, 0]


def test_groups_found_in_two_ways_become_one():
    one = Copies(group=np.array([0, 0, -1, -1], np.int32), similarity=np.array([1, 1, 0, 0], np.float32))
    two = Copies(group=np.array([-1, 1, 1, -1], np.int32), similarity=np.array([0, 0.9, 0.9, 0], np.float32))
    merged = both(one, two)
    assert merged.group.tolist() == [0, 0, 0, -1]
    assert merged.size.tolist() == [3, 3, 3, 1]


def test_each_member_has_its_turn():
    copies = Copies(group=np.array([0, -1, 0, 3, 3, 0], np.int32), similarity=np.zeros(6, np.float32))
    turns = np.stack([copies.turn(window) for window in range(6)])
    assert turns[:, 1].all()
    assert (turns[:, [0, 2, 5]].sum(axis=1) == 1).all()
    assert (turns[:, [3, 4]].sum(axis=1) == 1).all()
    assert (turns[:3, [0, 2, 5]].sum(axis=0) == 1).all()


def test_the_filter_leaves_out_all_but_one_and_says_so():
    view = View(Ledger(3), Clock(window=0, windows=5))
    assert redundancy(view).keep is None
    copies = Copies(group=np.array([0, 0, -1], np.int32), similarity=np.ones(3, np.float32))
    said = redundancy(View(Ledger(3), Clock(window=1, windows=5), copies=copies))
    assert said.keep.tolist() == [False, True, True]
    with pytest.raises(ConfigError, match="ratio"):
        redundancy(view, ratio=2)


# ---------------------------------------------------------------- the search beside the training


def visited(search: CopySearch, x: np.ndarray, times: int, seed: int = 0) -> CopySearch:
    """Every sample is visited so many times."""
    rng = np.random.default_rng(seed)
    search.embeddings = search.embeddings or Embeddings(*x.shape)
    for _ in range(times):
        for ids in np.array_split(rng.permutation(len(x)), 8):
            search.embeddings.record(ids, (x[ids] + rng.normal(0, 0.2, (len(ids), x.shape[1]))).astype(np.float32))
    return search


@pytest.mark.parametrize("begun", [False, True])
def test_what_one_edge_searches_for_the_next_one_knows_whatever_happens_in_between(begun):
    x, origin = clouds(600, 200)
    label = np.zeros(len(x), dtype=np.int32)
    search = visited(CopySearch(len(x), visits=4), x, 4)
    wanted = near_copies(search.embeddings, label)
    assert not search.look(label)
    assert search.found is None
    if begun:
        search.begin()
    visited(search, x, 1, seed=1)  # comes too late for this search
    assert search.look(label)
    np.testing.assert_array_equal(search.found.group, wanted.group)
    assert found_of(search.found.group, origin)[0] > 0.9


def test_a_search_under_way_is_saved_as_what_it_will_find():
    x, _ = clouds(600, 200)
    label = np.zeros(len(x), dtype=np.int32)
    search = visited(CopySearch(len(x), visits=4), x, 4)
    search.look(label)
    search.begin()
    again = CopySearch(len(x), visits=4)
    again.load_state_dict(search.state_dict())
    assert again.found is None
    for one in (search, again):
        assert one.look(label)
        assert not one.look(label)
    np.testing.assert_array_equal(again.found.group, search.found.group)
    assert again.next_look == search.next_look


def test_the_last_look_answers_at_once_and_takes_what_was_under_way():
    x, origin = clouds(600, 200)
    label = np.zeros(len(x), dtype=np.int32)
    search = visited(CopySearch(len(x)), x, 4)  # too few visits for any other look
    assert not search.look(label)
    assert search.look(label, last=True)
    assert found_of(search.found.group, origin)[0] > 0.9
    assert not search.look(label, last=True)
    visited(search, x, 7)
    assert not search.look(label)
    search.begin()
    assert search.look(label, last=True)
    assert not search.look(label, last=True)


def test_a_search_that_fails_says_so_where_its_result_is_taken():
    x, _ = clouds(100, 50)
    search = visited(CopySearch(len(x), visits=2), x, 2)
    search.look(np.zeros(5, dtype=np.int32))  # labels of another data set
    search.begin()
    with pytest.raises(IndexError):
        search.look(np.zeros(len(x), dtype=np.int32))


@pytest.mark.parametrize("n", [10, 5_000, 50_000, 10_000_000])
def test_pauses_between_looks_grow_with_the_search_and_with_visits(n):
    assert 3 <= pause(n, 6) <= 9
    assert pause(n, 60) >= pause(n, 6)
    assert pause(2 * n, 6) >= pause(n, 6)


def test_features_are_wanted_of_every_window_until_copies_were_looked_for():
    x, _ = clouds(600, 200)
    search = visited(CopySearch(len(x), visits=4), x, 4)
    assert all(search.wants(window) for window in range(8))
    search.look(np.zeros(len(x), dtype=np.int32), last=True)
    assert [search.wants(window) for window in range(8)] == [True, False, False, False] * 2
    assert not CopySearch(len(x), given=x).wants(0)


# ---------------------------------------------------------------- runs


def test_given_embeddings_work_from_the_first_window_on():
    x, origin = clouds()
    selector = salience.Selector(len(x), epochs=3, select=ONCE, embeddings=x, labels=np.zeros(len(x), dtype=np.int64))
    next(iter(selector))
    groups = len(np.unique(origin))
    assert len(selector.plan) == pytest.approx(groups, rel=0.02)
    assert [e["samples"] for e in selector.events.recent if e["kind"] == "copies"]


def train_on(
    x: torch.Tensor, y: torch.Tensor, epochs: int, state: dict | None = None, stop: int = 99
) -> salience.Loader:
    """A real run in which each epoch shows the samples with fresh noise, as augmentation does."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(x.shape[1], 64), nn.Tanh(), nn.Linear(64, 5))
    loader = salience.Loader(
        TensorDataset(x, y), 64, epochs=epochs, select={**ONCE, "filters": [{"name": "redundancy", "visits": 3}]}
    )
    loader.attach(model)
    if state is not None:
        loader.load_state_dict(state)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for epoch in range(loader.epoch, min(stop, epochs)):
        for number, (inputs, targets) in enumerate(loader):
            noise = torch.randn(inputs.shape, generator=torch.Generator().manual_seed(1000 * epoch + number))
            logits = model(inputs + 0.2 * noise)
            loss = loader.loss(F.cross_entropy(logits, targets, reduction="none"), logits, targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return loader


def test_features_of_the_model_in_training_find_them_and_resume_remembers():
    x, origin = clouds(600, 200)
    x, y = torch.from_numpy(x), torch.from_numpy(origin % 5)
    whole = train_on(x, y, 8)
    recall, precision = found_of(whole.copies.group, origin)
    assert recall > 0.9
    assert precision > 0.9
    state = train_on(x, y, 8, stop=6).state_dict()
    again = salience.Loader(
        TensorDataset(x, y), 64, epochs=8, select={**ONCE, "filters": [{"name": "redundancy", "visits": 3}]}
    )
    again.load_state_dict(state)
    assert (again.copies.group >= 0).any()
    kept = again._run.copying.search.embeddings
    assert kept.typical_visits > 3
    assert kept.weight > 0


class Files(Dataset):
    """Samples with bytes of their own; every third is a copy of the first."""

    def __init__(self, n: int = 30) -> None:
        self.x = torch.arange(n, dtype=torch.float32)[:, None].repeat(1, 4)
        self.x[::3] = 0

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        return self.x[i], 0

    def salience_fingerprints(self, ids: list[int]) -> np.ndarray:
        return np.array([int(self.x[i, 0]) + 1 for i in ids], dtype=np.int64)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("part", [False, True])
def test_byte_copies_come_with_the_batches_at_no_extra_read(workers, part):
    data = Subset(Files(), range(6, 30)) if part else Files()
    loader = salience.Loader(data, 1, epochs=4, select=ONCE, num_workers=workers)
    sizes: list[int] = []
    for _ in range(4):
        for x, y in loader:
            loader.loss(x.sum(1), targets=y)
        sizes.append(len(loader.plan))
    n = len(data)
    assert sizes == [n, *[n - n // 3 + 1] * 3]
    assert loader.copies.similarity.max() == 1


def test_byte_copies_survive_a_resume_between_two_windows():
    def run(epochs: int, state: dict | None = None) -> tuple[list[int], dict]:
        loader = salience.Loader(Files(), 8, epochs=4, select=ONCE)
        if state is not None:
            loader.load_state_dict(state)
        sizes: list[int] = []
        while loader.epoch < epochs:
            for x, y in loader:
                loader.loss(x.sum(1), targets=y)
            sizes.append(len(loader.plan))
        return sizes, loader.state_dict()

    whole, _ = run(4)
    first, state = run(1)
    assert first + run(4, state)[0] == whole


def test_a_feature_that_is_not_finite_is_left_out():
    kept = Embeddings(4, 3)
    kept.record(np.arange(4), np.array([[1, 2, 3]] * 3 + [[np.inf, 0, 0]], dtype=np.float32))
    assert kept.visits.tolist() == [1, 1, 1, 0]
    assert np.isfinite(kept.scatter).all()


def test_a_group_that_fills_its_own_surroundings_is_found():
    x, _ = clouds(400, 0)
    same = np.concatenate((x, np.repeat(x[:1], 30, axis=0)))
    group = near_copies(Embeddings.given(same, len(same)), np.zeros(len(same), dtype=np.int32)).group
    assert len(set(group[400:])) == 1
    assert group[0] == group[400]


def test_other_embeddings_are_refused_on_resume():
    x, _ = clouds()
    state = salience.Selector(len(x), epochs=3, select=ONCE, embeddings=x).state_dict()
    with pytest.raises(salience.StateError, match="embeddings"):
        salience.Selector(len(x), epochs=3, select=ONCE, embeddings=x + 1).load_state_dict(state)


def test_steps_are_not_promised_where_copies_may_be_left_out():
    assert salience.Selector(20, epochs=3, select=ONCE).total_steps is None
