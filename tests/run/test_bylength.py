"""`batch_tokens=`: batches of samples of similar length, every sample once, every one with its exact weight."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, Subset

import salience
from salience.errors import ConfigError, DataError, StateError
from salience.run.bylength import token_batches

N, MOST = 400, 300


class Texts(Dataset):
    """400 texts of 1 to 60 tokens, most of them short."""

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        self.sizes = np.minimum(60, 1 + rng.geometric(0.08, N))

    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> torch.Tensor:
        return torch.full((self.sizes[i],), i)


def padded(samples):
    return torch.nn.utils.rnn.pad_sequence(samples, batch_first=True, padding_value=-1)


def make(data=None, **options):
    data = Texts() if data is None else data
    return salience.Loader(data, batch_tokens=MOST, collate_fn=padded, with_ids=True, **options)


def passes(loader, epochs=1):
    """Ids of each batch; each sample's loss is its number."""
    found = []
    for _ in range(epochs):
        for ids, batch in loader:
            assert (batch[:, 0] == ids).all()
            assert batch.numel() <= MOST
            loader.loss(ids.float() % 13, ids=ids)
            found.append(ids.tolist())
    return found


def joined(batches):
    return [i for batch in batches for i in batch]


@pytest.mark.parametrize("select", [None, "uniform"])
def test_every_sample_comes_once_in_batches_that_fit(select):
    loader = make(select=None if select is None else {"preset": select, "keep": 1.0}, epochs=2)
    for _ in range(2):
        assert sorted(joined(passes(loader))) == list(range(N))
    assert (loader.ledger.seen == 2).all()
    assert loader.progress == 1


def test_a_selecting_window_visits_what_its_curve_grants():
    loader = make(select="uniform", epochs=3)
    visited = joined(passes(loader))
    assert len(set(visited)) == len(visited) == N // 2


def test_batches_are_of_similar_length_and_come_in_random_order():
    loader = make(lengths=Texts().sizes)
    sizes = [Texts().sizes[ids] for ids in passes(loader)]
    assert np.mean([(size.max() - size.min()) for size in sizes]) < 5
    longest = [int(size.max()) for size in sizes]
    assert longest != sorted(longest)
    assert longest != sorted(longest, reverse=True)


def test_the_padding_that_is_saved_is_measured():
    loader = make()
    batches = passes(loader)
    sizes = Texts().sizes
    (event,) = [e for e in loader.events.recent if e.kind == "lengths"]
    assert event["tokens"] == sizes.sum()
    assert event["padded"] == sum(len(ids) * sizes[ids].max() for ids in batches)
    assert event["padding_saved"] > 0.3
    assert f"{event['padding_saved']:.1%} fewer tokens are computed" in loader.report()


def test_every_sample_counts_alike_whatever_batch_it_is_in():
    loader = make()
    x = torch.randn(N)
    parameter = torch.zeros(1, requires_grad=True)
    steps = 0
    for ids, _ in loader:
        loader.loss(parameter * x[ids], ids=ids).backward()
        steps += 1
    torch.testing.assert_close(parameter.grad / steps, x.mean()[None])


def test_every_token_counts_alike_whatever_batch_it_is_in():
    loader = make()
    x = torch.randn(N)
    parameter, sizes = torch.zeros(1, requires_grad=True), torch.from_numpy(Texts().sizes)
    steps = 0
    for ids, batch in loader:
        loader.loss(parameter * x[ids][:, None] * torch.ones(batch.shape), mask=batch >= 0, ids=ids).backward()
        steps += 1
    wanted = (x * sizes).sum() / sizes.sum()
    torch.testing.assert_close(parameter.grad / steps, wanted[None])


def test_unbiased_weights_stay_unbiased():
    x = torch.from_numpy(np.random.default_rng(1).normal(size=N)).float() + 1
    means = []
    for seed in range(60):
        loader = make(select="infobatch", epochs=4, seed=seed)
        passes(loader, 1)
        parameter, steps = torch.zeros(1, requires_grad=True), 0
        for ids, _ in loader:
            loader.loss(parameter * x[ids], ids=ids).backward()
            steps += 1
        means.append(float(parameter.grad) / steps)
    error = np.std(means) / len(means) ** 0.5
    assert abs(np.mean(means) - float(x.mean())) < 3 * error


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("stop", [1, 9])
def test_a_run_stopped_in_mid_window_goes_on_with_the_same_batches(stop, workers):
    def new():
        return make(select="default", epochs=3, num_workers=workers)

    whole, first, seen = passes(new(), 3), new(), []
    for ids, _ in first:
        first.loss(ids.float() % 13, ids=ids)
        seen.append(ids.tolist())
        if len(seen) == stop:
            break
    second = new()
    second.load_state_dict(first.state_dict())
    assert seen + passes(second, 3) == whole


def test_windows_shorter_than_an_epoch_have_such_batches_too():
    loader = make(window=150, epochs=1)
    assert sorted(joined(passes(loader))) == list(range(N))


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("count", [2, 47, 400])
def test_ranks_take_disjoint_parts_that_fit(world, count):
    from salience.events import EventLog
    from salience.plan import Plan
    from salience.run.bylength import ByLength
    from salience.run.part import Setup, Voice

    class Ranks:
        def __init__(self, rank):
            self.rank, self.world, self.leads_node = rank, world, rank == 0

    ones, ids = np.ones(count, dtype=np.float32), np.random.default_rng(2).permutation(count)
    plan = Plan(
        window=0, population=N, batch_size=1, ids=ids, weights=ones, importance=ones.copy(),
        level=np.zeros(count, dtype=np.uint8),
    )  # fmt: skip
    visits, weights = [], []
    for rank in range(world):
        setup = Setup(n=N, batch_size=1, epochs=1, seed=0, drop_last=False, ranks=Ranks(rank), mean_batch=20)
        shard = ByLength(setup, Voice(EventLog(), strict=True), Texts().sizes, MOST).divide(plan)
        for k in range(len(shard)):
            mine = shard.ids(k)
            assert len(mine) > 0
            assert len(mine) * Texts().sizes[mine].max() <= MOST
            visits += mine[shard.weights(k) > 0].tolist()
            weights.append(shard.weights(k).sum())
    assert sorted(visits) == list(range(count))
    assert sum(weights) == shard.global_sizes.sum() == count


def test_only_the_last_batch_may_be_small():
    lengths = np.random.default_rng(0).integers(1, 50, 10_000)
    batches = list(token_batches(lengths, 1_000, 600))
    fill = np.array([len(b) * lengths[b].max() / 1_000 for b in batches[:-1]])
    assert fill.min() > 0.94
    assert sorted(np.concatenate(batches)) == list(range(10_000))


def test_lengths_come_from_a_column_an_attribute_or_one_pass():
    class Known(Texts):
        @property
        def lengths(self):
            return self.sizes

    class Columns(Texts):
        column_names = ("n",)

        def __getitem__(self, i):
            return self.sizes.tolist() if i == "n" else super().__getitem__(i)

    wanted = passes(make(lengths=Texts().sizes))
    assert wanted == passes(make()) == passes(make(Known())) == passes(make(Columns(), lengths="n"))
    part = make(Subset(Known(), range(10, 60)))
    assert sorted(i for ids, _ in part for i in ids.tolist()) == list(range(50))
    with pytest.raises(ConfigError, match="column 'm', which the data set lacks; it has n"):
        make(Columns(), lengths="m")


def test_empty_texts_cost_nothing_and_are_counted_where_their_mask_is_zero():
    sizes = Texts().sizes
    sizes[:5] = 0
    loader = salience.Loader(Texts(), batch_tokens=MOST, lengths=sizes, collate_fn=padded, with_ids=True)
    for ids, batch in loader:
        mask = (batch >= 0) & (ids >= 5)[:, None]
        loader.loss(torch.ones(batch.shape), mask=mask, ids=ids)
    assert loader.ledger.bad.sum() == 5
    assert loader.ledger.seen.sum() == N - 5


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"lengths": [1, 2]}, "pass lengths="),
        ({"lengths": [-1] * N}, "has -1 for sample 0"),
        ({"lengths": [1.5] * N}, "has 1.5 for sample 0"),
        ({"lengths": [float("nan")] * N}, "has nan for sample 0"),
        ({"lengths": "words"}, "no such column"),
        ({"lengths": [1] * 399 + [301]}, r"1 of 400 samples are longer than batch_tokens = 300 \(sample 399 has 301\)"),
        ({"batch_tokens": 0}, "at least 1"),
        ({"batch_tokens": 2.5}, "must be an integer"),
        ({"batch_size": 4}, "choose one"),
        ({"drop_last": True}, "leaves nothing out"),
        ({"even": True, "epochs": 2}, "choose one"),
        ({"balance": True}, "leave out balance="),
        ({"select": {"preset": "uniform", "steps": "constant"}, "epochs": 2}, 'steps = "fewer"'),
        ({"treat": "reuse", "augment": []}, "leave one out"),
        ({"batch_tokens": None, "lengths": [1] * N}, "are for batch_tokens="),
    ],
)  # fmt: skip
def test_bad_input_is_one_sentence(options, said):
    with pytest.raises(ConfigError, match=said):
        salience.Loader(Texts(), **{"batch_tokens": MOST, **options})


def test_samples_without_a_sequence_are_named():
    with pytest.raises(DataError, match="Sample 0 is a str without a sequence of tokens to measure; pass lengths="):
        salience.Loader(["some", "texts"], batch_tokens=8)


def test_a_state_fits_only_the_same_number_of_tokens():
    state = make(epochs=2).state_dict()
    with pytest.raises(StateError, match="batch_tokens"):
        salience.Loader(Texts(), batch_tokens=MOST + 1, epochs=2).load_state_dict(state)
