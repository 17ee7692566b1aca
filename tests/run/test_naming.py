"""`keys=`: samples have names, so that a ledger is about the same samples when data is added, removed or moved."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset

import salience
from salience import ledger as ledgers
from salience.errors import ConfigError, DataError, StateError
from salience.run.naming import content_key, keys_of


class Pages(Dataset):
    """Pages by address; the loss of a page is its number."""

    def __init__(self, numbers) -> None:
        self.numbers = list(numbers)

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, i: int):
        return {"url": f"https://example.org/{self.numbers[i]}", "x": torch.tensor(float(self.numbers[i]))}


def run(data, epochs=1, **options):
    loader = salience.Loader(data, 10, keys="url", epochs=epochs, **options)
    for _ in range(epochs):
        for batch in loader:
            loader.loss(batch["x"])
    return loader


def known(loader):
    """Page -> its loss in the ledger."""
    keys = loader.ledger.keys
    return dict(zip(keys, loader.ledger.last_loss.tolist(), strict=True))


@pytest.mark.parametrize("file", [True, False])
def test_a_ledger_survives_a_tenth_added_and_a_tenth_removed(tmp_path, file):
    first = run(Pages(range(100)))
    ledger = first.ledger
    if file:
        ledgers.save(ledger, tmp_path / "ledger.npz")
        ledger = tmp_path / "ledger.npz"
    numbers = np.random.default_rng(0).permutation([*range(10, 100), *range(200, 210)])
    loader = salience.Loader(Pages(numbers), 10, keys="url", ledger=ledger)
    for i, number in enumerate(numbers):
        if number >= 200:
            assert loader.ledger.seen[i] == 0
            assert np.isnan(loader.ledger.last_loss[i])
        else:
            assert loader.ledger.seen[i] == 1
            assert loader.ledger.last_loss[i] == number
    (event,) = [e for e in loader.events.recent if e.kind == "keys"]
    assert (event["known"], event["new"], event["gone"]) == (90, 10, 10)


def test_a_data_set_grows_between_two_epochs():
    data = Pages(range(40))
    loader = salience.Loader(data, 10, keys="url", epochs=5, select="default")
    for epoch in range(5):
        for batch in loader:
            loader.loss(batch["x"])
        if epoch == 1:
            data.numbers += range(100, 120)
    assert loader.n == len(loader.ledger.keys) == 60
    assert known(loader) == {f"https://example.org/{k}": k for k in data.numbers}
    assert loader.ledger.seen[40:].min() >= 1
    assert loader.progress == 1


def test_what_grew_is_saved_and_resumed():
    data = Pages(range(40))
    first = salience.Loader(data, 10, keys="url", epochs=3)
    for batch in first:
        first.loss(batch["x"])
    data.numbers += range(40, 60)
    it = iter(first)
    seen = [next(it)["x"].tolist()]
    second = salience.Loader(data, 10, keys="url", epochs=3)
    second.load_state_dict(first.state_dict())
    rest = [batch["x"].tolist() for batch in second]
    assert sorted(i for batch in seen + rest for i in batch) == list(range(60))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda numbers: numbers.insert(0, 77), "sample 0 was 'https://example.org/0' and is now 'https://example.org/77'"),
        (lambda numbers: numbers.pop(), "20 became 19"),
        (lambda numbers: numbers.append(3), "1 samples were added under a key of another one"),
    ],
)  # fmt: skip
def test_what_is_removed_or_moved_during_a_run_is_refused_in_one_sentence(change, said):
    data = Pages(range(20))
    loader = run(data, 1)
    change(data.numbers)
    with pytest.raises(DataError, match=said):
        iter(loader)


def test_what_has_one_entry_per_sample_says_that_it_cannot_grow():
    data = Pages(range(20))
    loader = run(data, 1, reference=np.ones(20))
    data.numbers.append(50)
    with pytest.raises(
        DataError, match="grew from 20 to 21 samples, and reference= has one opinion per sample: make a new"
    ):
        iter(loader)


def test_subsets_and_concatenations_have_the_keys_of_what_they_are_made_of():
    one, two = Pages(range(5)), Pages(range(5, 9))
    joined = ConcatDataset([Subset(one, [3, 1]), two])
    assert keys_of(joined, "positions") == ["0/3", "0/1", "1/0", "1/1", "1/2", "1/3"]
    assert keys_of(joined, "url")[:2] == ["https://example.org/3", "https://example.org/1"]
    assert keys_of(Subset(one, [4, 0]), "positions") == [4, 0]


def test_a_subset_of_other_samples_finds_its_rows():
    data = Pages(range(30))
    first = salience.Loader(Subset(data, range(20)), 10, keys="positions")
    for batch in first:
        first.loss(batch["x"])
    second = salience.Loader(Subset(data, range(29, 9, -1)), 10, keys="positions", ledger=first.ledger)
    np.testing.assert_array_equal(second.ledger.seen, [0] * 10 + [1] * 10)
    np.testing.assert_array_equal(second.ledger.last_loss[10:], range(19, 9, -1))


def test_equal_samples_have_equal_content_keys_and_others_do_not():
    samples = [
        "a", b"a", 1, 1.0, True, None, ["a"], ("a", ""), {"a": 1}, {"a": 2}, torch.ones(2), torch.ones(2, 1), torch.tensor(1),
        torch.ones(2, dtype=torch.float64), np.ones(2, dtype=np.int64), torch.ones(2).bfloat16(), ["a", ["b"]], ["a", "b"],
    ]  # fmt: skip
    assert len({content_key(sample) for sample in samples}) == len(samples)
    assert content_key({"a": torch.ones(2), "b": 1}) == content_key({"b": 1, "a": torch.ones(2)})
    with pytest.raises(DataError, match="whose content has no stable hash; pass keys="):
        content_key(object())


@pytest.mark.parametrize(
    ("keys", "error", "said"),
    [
        ([1, 2], ConfigError, "2 keys for 20 samples"),
        (["a"] * 20, DataError, r"19 of 20 samples have the key of another one \(samples 0 and 1 are both 'a'\)"),
        ([[1]] * 20, DataError, r"A key is \[1\], a list; keys are strings, integers or bytes"),
        ("name", DataError, r"no field 'name' to be its key \(it has url, x\)"),
        (lambda sample: sample["x"] / 2, DataError, "a float; keys are strings"),
    ],
)  # fmt: skip
def test_bad_keys_are_one_sentence(keys, error, said):
    with pytest.raises(error, match=said):
        salience.Loader(Pages(range(20)), keys=keys)


def test_ledgers_with_and_without_keys_are_not_matched_silently():
    with_keys, without = run(Pages(range(20))), salience.Loader(Pages(range(20)), 10)
    with pytest.raises(StateError, match="The ledger has keys and this run has none"):
        salience.Loader(Pages(range(20)), 10, ledger=with_keys.ledger)
    with pytest.raises(StateError, match="This run has keys and the ledger has none"):
        salience.Loader(Pages(range(20)), 10, keys="url", ledger=without.ledger)


def test_a_state_is_refused_for_other_samples_of_the_same_number():
    state = run(Pages(range(20)), 1).state_dict()
    with pytest.raises(StateError, match="same data set and keys="):
        salience.Loader(Pages(range(1, 21)), 10, keys="url", epochs=1).load_state_dict(state)


def test_keys_in_a_damaged_file_are_refused(tmp_path):
    ledger = run(Pages(range(20))).ledger
    for broken in (b"{", b'["a"]', b'[["a"]]'):
        ledger.keys.array = lambda broken=broken: np.frombuffer(broken, dtype=np.uint8)
        ledgers.save(ledger, tmp_path / "ledger.npz")
        with pytest.raises(StateError, match="cannot be loaded"):
            ledgers.load(tmp_path / "ledger.npz")
