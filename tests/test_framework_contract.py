"""What frameworks that fetch ahead, move batches or ask for len once rely on; and collate functions that change rows."""

from __future__ import annotations

import collections

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset, default_collate

import salience
from salience.errors import ConfigError, DataError, LossError, StateError
from salience.run.moving import can_be_copied_beside, moved, tensors_of

N = 100
DICTS = [{"x": float(i), "y": i % 3} for i in range(N)]


def warnings(loader) -> list[str]:
    return [event["text"] for event in loader.events.recent if event["kind"] == "warning"]


# --- ids inside the batch ---


def test_ids_ride_in_dict_batches_so_that_losses_of_batches_fetched_ahead_find_their_samples():
    loader = salience.Loader(DICTS, 10, epochs=2, ids_key="_ids")
    ahead = []
    for _ in range(2):
        for batch in loader:
            ahead.append(batch)
            if len(ahead) == 4:
                first = ahead.pop(0)
                loader.loss(first["x"], ids=first["_ids"])
    for batch in ahead:
        loader.loss(batch["x"], ids=batch["_ids"])
    assert (loader.ledger.seen == 2).all()
    np.testing.assert_array_equal(loader.ledger.last_loss, np.arange(N))


@pytest.mark.parametrize("collate", [default_collate, lambda samples: tuple(default_collate(samples))])
def test_ids_are_the_last_field_of_tuples_and_lists(collate):
    loader = salience.Loader(TensorDataset(torch.arange(N)), 10, ids_key="_ids", collate_fn=collate)
    plain = salience.Loader(TensorDataset(torch.arange(N)), 10, collate_fn=collate)
    for batch, without in zip(loader, plain, strict=True):
        assert type(batch) is type(without)
        assert batch[0].tolist() == batch[1].tolist() == without[0].tolist()


class Pair(collections.namedtuple("Pair", "x y")):
    pass


@pytest.mark.parametrize("collate", [lambda samples: torch.tensor(samples), lambda samples: Pair(1, 2), len])
def test_batches_that_have_no_room_for_ids_say_what_to_use(collate):
    with pytest.raises(DataError, match="Use with_ids=True instead"):
        next(iter(salience.Loader(range(N), 10, ids_key="_ids", collate_fn=collate)))


def test_weights_of_a_batch_are_those_that_loss_applies():
    loader = salience.Loader(DICTS, 10, epochs=4, select="infobatch", ids_key="_ids")
    for _ in range(4):
        for batch in loader:
            weights = loader.weights(batch["_ids"])
            loss = loader.loss(batch["x"], ids=batch["_ids"])
            assert loss.item() == pytest.approx(float((weights * batch["x"]).mean()), rel=1e-5)
            assert torch.equal(loader.weights(), weights)


# --- collate functions that change rows ---


def dropping(samples):
    keep = [k for k, i in enumerate(samples) if i % 4]
    return salience.Collated(torch.tensor([samples[k] for k in keep]), keep)


def repeating(samples):
    return salience.Collated(torch.tensor(samples * 2), [*range(len(samples))] * 2)


def reordering(samples):
    order = np.argsort(samples)[::-1].copy()
    return salience.Collated(torch.tensor([samples[k] for k in order]), order)


@pytest.mark.parametrize("with_ids", [True, False])
@pytest.mark.parametrize("select", [None, "infobatch"])
@pytest.mark.parametrize("collate", [dropping, repeating, reordering])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_collate_function_that_says_which_samples_its_rows_are_is_followed(collate, select, with_ids, workers):
    loader = salience.Loader(
        range(N), 10, epochs=3, collate_fn=collate, with_ids=with_ids, select=select, num_workers=workers
    )
    seen, sums = np.zeros(N, dtype=int), 0.0
    for _ in range(3):
        for batch in loader:
            ids, x = batch if with_ids else (None, batch)
            assert ids is None or ids.tolist() == x.tolist()
            by_id = dict(zip(loader.plan.ids.tolist(), loader.plan.weights.tolist(), strict=True))
            loss = loader.loss(x.float(), ids=ids)
            sums = np.mean([by_id[i] * i for i in x.tolist()])
            assert loss.item() == pytest.approx(sums, rel=1e-4)
            np.add.at(seen, x.numpy(), 1)
    ledger = loader.ledger
    np.testing.assert_array_equal(ledger.seen, seen)
    visited = seen > 0
    np.testing.assert_array_equal(ledger.last_loss[visited], np.arange(N)[visited])


def test_a_dict_batch_may_name_its_samples_itself():
    def collate(samples):
        return {"x": torch.tensor(samples[::-1]), "_ids": torch.tensor(samples[::-1])}

    loader = salience.Loader(range(N), 10, collate_fn=collate, ids_key="_ids")
    for batch in loader:
        loader.loss(batch["x"].float(), ids=batch["_ids"])
    np.testing.assert_array_equal(loader.ledger.last_loss, np.arange(N))
    wrong = salience.Loader(range(N), 10, collate_fn=lambda samples: {"_ids": torch.arange(10) - 5}, ids_key="_ids")
    with pytest.raises(DataError, match="under '_ids'"):
        next(iter(wrong))


def test_positions_that_do_not_exist_are_refused():
    loader = salience.Loader(
        range(N), 10, collate_fn=lambda samples: salience.Collated(torch.tensor(samples), [10] * 10)
    )
    with pytest.raises(DataError, match="from 0 to 9"):
        next(iter(loader))


@pytest.mark.parametrize("collate", [lambda s: torch.tensor(s[:-1]), lambda s: {"x": torch.tensor(s + s)}])
def test_a_collate_function_that_changes_rows_silently_is_named_at_the_loss(collate):
    loader = salience.Loader(range(N), 10, collate_fn=collate)
    batch = next(iter(loader))
    with pytest.raises(LossError, match=r"The collate function was given 10 samples.*salience\.Collated"):
        loader.loss((batch["x"] if isinstance(batch, dict) else batch).float())


def by_length(samples):
    samples.sort(key=lambda sample: -sample[1])  # in place, as for pack_padded_sequence
    return torch.tensor([x for x, _ in samples]), torch.tensor([y for _, y in samples])


def by_name(samples):
    return {"x": torch.stack([s["x"] for s in reversed(samples)]), "of": {"y": [s["y"] for s in reversed(samples)]}}


REORDERING = {
    "sorted": ([(float(i % 7), i % 3) for i in range(N)], by_length),
    "dicts": ([{"x": torch.tensor([i / 3]), "y": i} for i in range(N)], by_name),
    "numbers": (range(N), lambda samples: torch.tensor(samples[::-1])),
    "numpy": (np.arange(N), lambda samples: torch.tensor(np.array(samples)).flip(0)),
}


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(("data", "collate"), REORDERING.values(), ids=REORDERING)
def test_a_collate_function_that_reorders_silently_is_named_at_the_loss(data, collate, workers):
    loader = salience.Loader(data, 10, collate_fn=collate, num_workers=workers, with_ids=True)
    ids, _ = next(iter(loader))
    for given in (None, ids):
        with pytest.raises(LossError, match=r"in another order.*salience\.Collated"):
            loader.loss(torch.rand(10), ids=given)
    for ask in (loader.weights, lambda: loader.pick(torch.rand(10))):
        with pytest.raises(LossError, match="in another order"):
            ask()


KEEPING = {
    "its own": lambda samples: (torch.tensor([x for x, _ in samples]), torch.tensor([y for _, y in samples])),
    "partners beside": lambda samples: (*default_collate(samples), torch.tensor([y for _, y in samples[::-1]])),
    "another scale": lambda samples: torch.tensor([x / 2 for x, _ in samples][::-1]),
    "one class": lambda samples: torch.zeros(len(samples)),
    "words": lambda samples: [str(y) for _, y in samples],
    "nothing": lambda samples: None,
    "bfloat16": lambda samples: default_collate(samples)[0].bfloat16(),
    "said": lambda samples: salience.Collated(default_collate(samples[::-1]), range(len(samples) - 1, -1, -1)),
}


@pytest.mark.parametrize("collate", KEEPING.values(), ids=KEEPING)
def test_a_collate_function_that_keeps_the_order_or_cannot_be_judged_is_left_alone(collate):
    data = [(float(i), i % 3) for i in range(N)]
    loader = salience.Loader(data, 10, collate_fn=collate)
    for _ in loader:
        loader.loss(torch.rand(10))
    assert (loader.ledger.seen == 1).all()


# --- devices ---


class Own:
    """A batch of the user's own, which knows how to move."""

    def __init__(self, x, where="start"):
        self.x, self.where = x, where

    def to(self, device):
        return Own(self.x.to(device), str(device))


def test_batches_are_moved_whatever_holds_their_tensors():
    device = torch.device("meta")
    x = torch.zeros(2)
    batch = {"a": [x, (x, "word")], "b": collections.OrderedDict(c=x), "d": Pair(x, 3), "e": Own(x), "f": None}
    got = moved(batch, device)
    assert got["a"][0].device == got["a"][1][0].device == got["b"]["c"].device == got["d"].x.device == device
    assert (got["a"][1][1], got["d"].y, got["e"].where, got["f"]) == ("word", 3, "meta", None)
    assert type(got["b"]) is collections.OrderedDict
    assert type(got["d"]) is Pair


def test_mappings_of_every_type_are_moved_and_keep_their_type():
    x = torch.zeros(2)
    for batch in (collections.defaultdict(list, a=x), collections.UserDict(a=x)):
        got = moved(batch, torch.device("meta"))
        assert type(got) is type(batch)
        assert got["a"].device.type == "meta"
        assert batch["a"] is x
        assert list(tensors_of(got)) == [got["a"]]


def test_an_object_that_hides_its_tensors_is_not_copied_beside_the_loop():
    """Nobody could tell the allocator that the loop still reads their memory."""
    x = torch.zeros(2)
    assert can_be_copied_beside({"a": [x, Pair(x, 3)], "b": collections.UserDict(c=x), "d": "word"})
    assert not can_be_copied_beside([x, {"a": Own(x)}])


@pytest.mark.parametrize("workers", [0, 1])
def test_a_device_for_batches_leaves_ids_on_the_host(workers):
    loader = salience.Loader(DICTS, 10, device="meta", ids_key="_ids", num_workers=workers)
    for batch in loader:
        assert batch["x"].device.type == "meta"
        assert batch["_ids"].device.type == "cpu"
    assert loader.device == torch.device("meta")


def test_a_device_changes_no_batch():
    plain = [x.tolist() for (x,) in salience.Loader(TensorDataset(torch.arange(N)), 10)]
    assert [x.tolist() for (x,) in salience.Loader(TensorDataset(torch.arange(N)), 10, device="cpu")] == plain


# --- even epochs, set_epoch, len ---


@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("select", ["default", "infobatch", "uniform", {"preset": "default", "keep": 1.0}])
def test_even_epochs_all_have_as_many_batches_as_len_says_at_the_start(select, window):
    loader = salience.Loader(DICTS, 7, epochs=10, select=select, even=True, window=window)
    length, total = len(loader), loader.total_steps
    counts = []
    for _ in range(10):
        counts.append(0)
        for batch in loader:
            assert len(batch["x"]) == 7
            logits = torch.stack((batch["x"], -batch["x"], 0 * batch["x"]), 1)
            loader.loss(batch["x"], logits, batch["y"])
            counts[-1] += 1
    assert counts == [length] * 10
    assert total == 10 * length
    assert loader.progress == pytest.approx(1.0)


def test_even_epochs_visit_about_as_much_as_uneven_ones():
    def visits(even):
        loader = salience.Loader(range(2000), 10, epochs=10, select="uniform", even=even)
        for _ in range(10):
            for x in loader:
                loader.loss(x.float())
        return loader.visits

    assert visits(True) == pytest.approx(visits(False), rel=0.02)


def test_even_and_what_moves_the_share_do_not_go_together(tmp_path):
    with pytest.raises(ConfigError, match="leave one of them out"):
        salience.Loader(DICTS, 10, epochs=5, select={"preset": "default", "keep": "auto"}, even=True)
    with pytest.raises(ConfigError, match="leave one of them out"):
        salience.Loader(DICTS, 10, epochs=5, auto="lossy", even=True)


def test_set_epoch_is_accepted_and_a_number_that_is_not_the_runs_own_is_said():
    loader = salience.Loader(DICTS, 10, epochs=3)
    for epoch in range(2):
        loader.set_epoch(epoch)
        loader.sampler.set_epoch(epoch)
        loader.batch_sampler.set_epoch(epoch)
        for _ in range(len(loader)):
            pass
        for _batch in loader:
            pass
    assert not warnings(loader)
    loader.set_epoch(7)
    assert "set_epoch(7)" in warnings(loader)[0]
    with pytest.raises(ConfigError, match="at least 0"):
        loader.set_epoch(-1)


def test_the_samplers_give_the_plan_in_progress():
    loader = salience.Loader(DICTS, 10, epochs=5, select="default", ids_key="_ids")
    with pytest.raises(StateError, match="call iter"):
        iter(loader.sampler)
    it = iter(loader)
    assert list(loader.sampler) == loader.plan.ids.tolist()
    assert [list(ids) for ids in loader.batch_sampler] == [batch["_ids"].tolist() for batch in it]
    assert len(loader.sampler) > 0


def test_a_loop_cut_to_a_length_from_before_the_plan_is_told():
    def surprising(candidates, budget, rng):
        """Draws more than it was granted."""
        take = min(len(candidates), 2 * budget)
        return salience.select.Draw(positions=np.arange(take), inclusion=np.ones(take, dtype=np.float32))

    loader = salience.Loader(DICTS, 5, epochs=6, select={"sampler": salience.registry.card(exact=False)(surprising),
                                                          "keep": 0.4, "scores": [], "filters": []})  # fmt: skip
    said = len(loader)
    it = iter(loader)
    for _ in range(said):
        next(it)
    assert len(loader) > said
    del it
    iter(loader)
    assert any("even=True" in text for text in warnings(loader))


def test_more_passes_than_epochs_go_on_and_that_is_said():
    loader = salience.Loader(DICTS, 10, epochs=2, select="default")
    for _ in range(4):
        for batch in loader:
            loader.loss(batch["x"], torch.zeros(len(batch["x"]), 3), batch["y"])
    assert (loader.epoch, loader.progress) == (4, 1.0)
    assert sum("More epochs" in text for text in warnings(loader)) == 1


def test_a_dataloader_is_no_data_set():
    with pytest.raises(DataError, match=r"dataloader\.dataset"):
        salience.Loader(DataLoader(DICTS), 10)


def test_a_loop_that_breaks_at_its_last_batch_has_finished_its_window():
    log, heard = salience.events.EventLog(), []
    log.listen(heard.append)
    loader = salience.Loader(DICTS, 10, epochs=3, log=log)
    for _ in range(3):
        for k, batch in enumerate(loader):
            loader.loss(batch["x"])
            if k == len(loader) - 1:
                break
    loader.state_dict()
    ends = [event for event in heard if event["kind"] == "window"]
    assert [event["finished"] for event in ends] == [True] * 3
    assert all(sum(event["overhead"].values()) <= event["seconds"] for event in ends[:1])


# --- drop_last ---


@pytest.mark.parametrize("select", ["default", "uniform", "infobatch"])
def test_a_selecting_window_with_drop_last_delivers_at_least_a_batch(select):
    data = [{"x": float(i), "y": i % 3} for i in range(150)]
    loader = salience.Loader(data, 128, epochs=6, select=select, drop_last=True)
    for _ in range(6):
        sizes = []
        for batch in loader:
            sizes.append(len(batch["x"]))
            loader.loss(batch["x"], torch.zeros(len(batch["x"]), 3), batch["y"])
        assert sizes == [128]


def test_lazy_mappings_are_not_read():
    class Lazy(collections.abc.Mapping):
        def __getitem__(self, key):
            raise AssertionError("read by salience")

        def __iter__(self):
            raise AssertionError("read by salience")

        def __len__(self):
            return 3

    for batch in salience.Loader(range(N), 10, collate_fn=lambda samples: Lazy()):
        assert isinstance(batch, Lazy)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_travel(layout):
    def collate(samples):
        return torch.nested.nested_tensor([torch.zeros(1 + i % 3) for i in samples], layout=layout), torch.tensor(
            samples
        )

    for nested, x in salience.Loader(range(N), 10, collate_fn=collate):
        assert nested.is_nested
        assert len(x) == 10
