"""Streams: no length, samples with keys, windows that buffer; plans, resumes and bad input."""

from __future__ import annotations

import importlib.util
import os
import signal

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

import salience
from salience import ledger as ledgers
from salience.errors import ConfigError, DataError, LossError, StateError

from conftest import require


class Stream(IterableDataset):
    """Numbers with an address, in the order of `numbers`."""

    def __init__(self, numbers) -> None:
        self.numbers = list(numbers)

    def __iter__(self):
        for k in self.numbers:
            yield {"url": f"page {k}", "x": torch.tensor(float(k))}


class Seeking(Stream):
    """The same, which can be brought back to where it stood."""

    at, reads = 0, 0

    def __iter__(self):
        begin, self.at = self.at, 0
        for place in range(begin, len(self.numbers)):
            self.reads += 1
            self.at = place + 1
            yield {"url": f"page {self.numbers[place]}", "x": torch.tensor(float(self.numbers[place]))}
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


def make(stream, **options):
    return salience.Loader(stream, **{"batch_size": 10, "keys": "url", "window": 40, **options})


def one_pass(loader, stop=None):
    """Numbers of each batch; the loss of a sample is its number."""
    seen = []
    for batch in loader:
        loader.loss(batch["x"])
        seen.append(batch["x"].tolist())
        if len(seen) == stop:
            break
    return seen


def joined(batches):
    return [k for batch in batches for k in batch]


def events(loader, kind):
    return [event for event in loader.events.recent if event.kind == kind]


def warnings(loader):
    return [event["text"] for event in events(loader, "warning")]


@pytest.mark.parametrize("drop_last", [False, True])
def test_observing_delivers_what_a_dataloader_would(drop_last):
    plain = DataLoader(Stream(range(105)), 10, drop_last=drop_last)
    loader = make(Stream(range(105)), drop_last=drop_last)
    for _ in range(2):
        assert one_pass(loader) == [batch["x"].tolist() for batch in plain]


def test_the_ledger_has_a_row_per_key_whatever_order_the_samples_come_in():
    stream = Stream(range(100))
    loader = make(stream)
    for seed in range(3):
        stream.numbers = np.random.default_rng(seed).permutation(100).tolist()
        one_pass(loader)
    assert loader.n == 100
    assert dict(zip(loader.ledger.keys, loader.ledger.last_loss.tolist(), strict=True)) == {
        f"page {k}": k for k in range(100)
    }
    assert (loader.ledger.seen == 3).all()


@pytest.mark.parametrize("select", ["uniform", "default", "infobatch"])
def test_what_was_never_seen_is_visited_and_of_the_rest_what_the_curve_says(select):
    loader = make(Stream(range(400)), select=select, epochs=10, window=200)
    visits = []
    for _ in range(10):
        batches = one_pass(loader)
        visits.append(len(joined(batches)))
        assert len(set(joined(batches))) == visits[-1]
        assert all(len(batch) == 10 for batch in batches)
    assert visits[0] == 400
    assert 150 <= visits[4] <= 320
    assert loader.progress == 1


def test_a_stream_that_grows_is_read_to_its_new_end():
    stream = Stream(range(80))
    loader = make(stream, select="uniform", epochs=3)
    one_pass(loader)
    stream.numbers += range(200, 240)
    second = joined(one_pass(loader))
    assert set(range(200, 240)) <= set(second)
    assert len(second) == 40 + 40
    assert loader.n == 120


def test_selection_without_a_number_of_passes_stays_in_the_middle_of_its_curve():
    loader = make(Stream(range(80)), select="default", window=80)
    visits = [len(joined(one_pass(loader))) for _ in range(4)]
    assert visits[:2] == [80, 80]
    assert visits[2:] == [40, 40]
    assert loader.progress == 0


def test_progress_is_known_from_the_first_pass_if_the_stream_has_a_length():
    class Sized(Stream):
        def __len__(self):
            return len(self.numbers)

    loader, seen = make(Sized(range(80)), epochs=2), []
    for _ in range(2):
        for _ in loader:
            seen.append(loader.progress)
    assert seen == pytest.approx([k / 16 for k in range(1, 17)])


@pytest.mark.parametrize("kind", [Stream, Seeking])
@pytest.mark.parametrize("select", [None, "default"])
@pytest.mark.parametrize("stop", [1, 4, 5, 10, 11, 13, 22])
def test_a_run_stopped_anywhere_goes_on_bit_for_bit(kind, select, stop):
    def new():
        return make(kind(range(105)), select=select, epochs=4)

    def passes(loader, before=0):
        return [batch for _ in range(before, 4) for batch in one_pass(loader)]

    whole = new()
    wanted = passes(whole)
    first, seen = new(), []
    while len(seen) < stop:
        seen += one_pass(first, stop - len(seen))
    state = first.state_dict()
    second = new()
    second.load_state_dict(torch.load(_saved(state), weights_only=True))
    assert seen + passes(second, second.epoch) == wanted
    for name in second.ledger:
        np.testing.assert_array_equal(second.ledger[name], whole.ledger[name])
    assert second.visits == whole.visits


def _saved(state):
    import io

    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return file


def test_a_stream_that_can_seek_is_not_read_again():
    first = make(Seeking(range(1_000)))
    one_pass(first, 95)
    stream = Seeking(range(1_000))
    second = make(stream)
    second.load_state_dict(first.state_dict())
    assert stream.reads <= 41, "the window in progress, and one sample more"
    assert joined(one_pass(second)) == list(range(950, 1_000))


def test_one_that_cannot_seek_says_so():
    loader = make(Stream(range(100)))
    one_pass(loader, 2)
    loader.state_dict()
    assert any("a resume reads it again from the beginning of its pass" in text for text in warnings(loader))
    loader = make(Seeking(range(100)))
    one_pass(loader, 2)
    loader.state_dict()
    assert not warnings(loader)


@pytest.mark.parametrize("kind", [Stream, Seeking])
def test_a_resume_over_other_samples_is_refused(kind):
    first = make(kind(range(100)))
    one_pass(first, 6)
    second = make(kind(range(100, 200)))
    with pytest.raises(StateError, match="gives other samples than before, or in another order"):
        second.load_state_dict(first.state_dict())


def test_a_ledger_of_a_stream_is_saved_with_its_keys_and_starts_another(tmp_path):
    first = make(Stream(range(90)), epochs=1)
    one_pass(first)
    ledgers.save(first.ledger, tmp_path / "ledger.npz")
    second = make(Stream(range(10, 100)), ledger=tmp_path / "ledger.npz", select="uniform", epochs=2, window=90)
    visited = joined(one_pass(second))
    assert set(range(90, 100)) <= set(visited)
    assert len(visited) == 50
    assert second.n == 100


def test_a_loop_left_in_mid_pass_begins_a_new_pass():
    loader = make(Stream(range(100)))
    one_pass(loader, 5)
    assert joined(one_pass(loader)) == list(range(100))
    assert loader.epoch == 2


def test_workers_may_read_the_stream():
    class Split(Stream):
        def __iter__(self):
            worker = torch.utils.data.get_worker_info()
            return iter({"url": k, "x": torch.tensor(float(k))} for k in self.numbers[worker.id :: worker.num_workers])

    loader = make(Split(range(200)), num_workers=2)
    assert sorted(joined(one_pass(loader))) == list(range(200))
    assert loader.ledger.keys.rows([7]).tolist() == np.flatnonzero(loader.ledger.last_loss == 7).tolist()


# PyTorch raises for a killed worker wherever the main process happens to be, in a destructor as well.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_worker_that_dies_is_one_sentence_and_nothing_delivered_is_lost():
    class Mortal(Stream):
        mortal = True

        def __iter__(self):
            for sample in super().__iter__():
                if self.mortal and sample["x"] == 150 and torch.utils.data.get_worker_info() is not None:
                    os.kill(os.getpid(), signal.SIGKILL)
                yield sample

    stream, seen = Mortal(range(200)), []
    loader = make(stream, num_workers=1)
    with pytest.raises(DataError, match=r"The stream failed after .* of pass 0 .*load_state_dict"):
        for batch in loader:
            loader.loss(batch["x"])
            seen.append(batch["x"].tolist())
    assert (loader.ledger.seen == 1).sum() == len(joined(seen)) > 0
    stream.mortal = False
    second = make(stream, num_workers=1)
    second.load_state_dict(loader.state_dict())
    assert joined(seen) + joined(one_pass(second)) == list(range(200))


def test_an_exception_in_the_stream_is_one_sentence():
    class Failing(Stream):
        def __iter__(self):
            yield from super().__iter__()
            raise OSError("connection reset")

    loader = make(Failing(range(95)))
    with pytest.raises(DataError, match=r"failed after 95 samples of pass 0 \(OSError: connection reset\)"):
        one_pass(loader)
    assert (loader.ledger.seen == 1).sum() == 80


def test_a_pass_that_ends_early_is_said_and_goes_on():
    stream = Stream(range(100))
    loader = make(stream)
    one_pass(loader)
    del stream.numbers[70:]
    assert joined(one_pass(loader)) == list(range(70))
    assert any("ended after 70 samples, and the one before had 100" in text for text in warnings(loader))


def test_keys_that_come_twice_in_a_window_are_counted():
    loader = make(Stream([1, 2, 2, 3, 1, *range(10, 45)]))
    assert joined(one_pass(loader)) == [1, 2, 3, *range(10, 45)]
    assert events(loader, "stream")[0]["repeated"] == 2
    assert any("a second time within one window" in text for text in warnings(loader))
    assert (loader.ledger.seen == 1).all()


def test_samples_that_are_none_are_counted():
    class Torn(Stream):
        def __iter__(self):
            for k, sample in enumerate(super().__iter__()):
                yield sample if k % 4 else None

    loader = make(Torn(range(100)))
    assert joined(one_pass(loader)) == [k for k in range(100) if k % 4]
    assert sum(event["empty"] for event in events(loader, "stream")) == 25
    assert "25 samples were left out and counted" in loader.report()


@pytest.mark.parametrize("stop", [4, 5, 7])
def test_such_a_stream_is_resumed_exactly_too(stop):
    class Torn(Stream):
        def __iter__(self):
            for k, sample in enumerate(super().__iter__()):
                yield sample if k % 4 else None

    whole, first = make(Torn(range(150))), make(Torn(range(150)))
    seen = one_pass(first, stop)
    second = make(Torn(range(150)))
    second.load_state_dict(first.state_dict())
    assert seen + one_pass(second) == one_pass(whole)
    assert "38 samples were left out" in second.report()


def test_empty_texts_are_visited_and_counted_as_without_tokens():
    class Texts(Stream):
        def __iter__(self):
            for k in self.numbers:
                yield {"url": k, "tokens": torch.full((4,), k), "mask": torch.full((4,), k % 5 > 0)}

    loader = make(Texts(range(50)))
    for batch in loader:
        loader.loss(batch["tokens"].float(), mask=batch["mask"])
    assert loader.ledger.bad.sum() == 10
    assert (loader.ledger.bad == [k % 5 == 0 for k in range(50)]).all()


def test_without_keys_samples_are_named_by_their_content_and_webdataset_by_its_own():
    loader = make(Stream(range(50)), keys=None)
    for _ in range(2):
        one_pass(loader)
    assert loader.n == 50

    def pipeline():
        return iter([{"__key__": f"{k:06d}", "x": torch.tensor(float(k))} for k in range(20)])

    class Pipeline:
        def __iter__(self):
            return pipeline()

    loader = make(Pipeline(), keys=None)
    one_pass(loader)
    assert list(loader.ledger.keys) == [f"{k:06d}" for k in range(20)]


def test_memory_is_stated():
    loader = make(Stream(range(100)))
    one_pass(loader)
    event = events(loader, "stream")[0]
    assert event["buffer_bytes"] > 40 * 4
    assert event["keys_bytes"] > 40 * 50
    assert "A window buffers up to 40 of them" in loader.report()


def test_hugging_face_streams_are_read_shuffled_and_resumed():
    require(importlib.util.find_spec("datasets") is not None, "datasets")
    import datasets

    def new():
        rows = datasets.Dataset.from_dict({"url": [f"p{k}" for k in range(95)], "x": [float(k) for k in range(95)]})
        return make(rows.to_iterable_dataset(num_shards=5).shuffle(seed=1, buffer_size=20), epochs=2, select="uniform")

    whole = new()
    wanted = one_pass(whole) + one_pass(whole)
    assert sorted(joined(wanted)[:95]) == list(range(95))
    first = new()
    seen = one_pass(first, 6)
    second = new()
    second.load_state_dict(first.state_dict())
    assert seen + one_pass(second) + one_pass(second) == wanted


class OneShot:
    """A generator in the clothes of a stream: it can be iterated over once."""

    def __init__(self) -> None:
        self.samples = iter(Stream(range(20)))

    def __iter__(self):
        return self.samples


def test_a_generator_has_one_pass():
    loader = make(OneShot())
    one_pass(loader)
    with pytest.raises(DataError, match=r"gave no sample in pass 1.*Generators end after one pass"):
        iter(loader)


@pytest.mark.parametrize(
    ("stream", "options", "error", "said"),
    [
        (Stream([]), {}, DataError, r"The stream \(Stream\) gave no sample in pass 0"),
        (Stream(range(9)), {"keys": "name"}, DataError, r"Sample 0 of pass 0 of the stream: .* no field 'name'"),
        (Stream(range(9)), {"keys": lambda sample: [1]}, DataError, r"A key is \[1\], a list; keys are strings"),
        (Stream(range(9)), {"keys": lambda sample: {}}, DataError, r"A key is \{\}, a dict"),
        (Stream(range(9)), {"keys": ["a"]}, ConfigError, "name a field, or pass a function"),
        (Stream(range(9)), {"keys": "positions"}, ConfigError, "name a field"),
        (Stream(range(9)), {"window": 5}, ConfigError, "at least one batch, 10"),
        (Stream(range(9)), {"even": True}, ConfigError, "even= needs a data set with __getitem__"),
        (Stream(range(9)), {"auto": True}, ConfigError, "auto= needs a data set with __getitem__"),
        (Stream(range(9)), {"reference": np.ones(9)}, ConfigError, "reference= needs a data set"),
        (Stream(range(9)), {"select": {"preset": "uniform", "keep": "auto"}}, ConfigError, "need the length of the data"),
    ],
)  # fmt: skip
def test_bad_input_is_one_sentence(stream, options, error, said):
    with pytest.raises(error, match=said):
        list(make(stream, **options))


def test_a_dataloader_of_a_stream_is_refused():
    with pytest.raises(DataError, match="pass what it reads"):
        salience.Loader(DataLoader(Stream(range(9)), 3), 3)


def test_what_a_stream_does_not_have_is_said():
    loader = make(Stream(range(50)))
    with pytest.raises(TypeError, match="A stream has no length"):
        len(loader)
    it = iter(loader)
    next(it)
    with pytest.raises(StateError, match="one iterator at a time"):
        next(iter(loader))
    with pytest.raises(ConfigError, match="which a stream has not"):
        loader.attach(torch.nn.Linear(1, 1), proxy=torch.nn.Linear(1, 1))
    with pytest.raises(LossError, match="must have one entry per token"):
        loader.loss(torch.ones(10), mask=torch.ones(10))
