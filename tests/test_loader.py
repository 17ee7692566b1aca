"""The front door: exactly unchanged when observing, fewer visits when selecting, ids that stay with their batch."""

from __future__ import annotations

import itertools
import random
import re
import threading
from collections import deque

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

import salience
from salience.batches import Order, Orders
from salience.errors import ConfigError, DataError, LossError

from conftest import make_model, train


class Dicts(Dataset):
    """Samples as dicts, fetched many at a time."""

    def __init__(self, problem: TensorDataset) -> None:
        self.problem = problem

    def __len__(self) -> int:
        return len(self.problem)

    def __getitem__(self, i: int) -> dict:
        x, y = self.problem[i]
        return {"x": x, "y": y, "index": float(i)}

    def __getitems__(self, many: list[int]) -> list[dict]:
        return [self[i] for i in many]


class Alone(Dataset):
    """Samples that are single tensors: their own index."""

    def __len__(self) -> int:
        return 50

    def __getitem__(self, i: int) -> torch.Tensor:
        return torch.tensor([float(i)])


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("drop_last", [False, True])
def test_observing_gives_bit_identical_parameters_to_the_plain_loop(problem, workers, drop_last):
    plain = DataLoader(
        problem, 32, shuffle=True, generator=torch.Generator().manual_seed(5), num_workers=workers, drop_last=drop_last
    )
    loader = salience.Loader(problem, 32, seed=5, num_workers=workers, drop_last=drop_last)
    one = train(plain, lambda losses, z, y: losses.mean(), epochs=3)
    two = train(loader, loader.loss, epochs=3)
    for a, b in zip(one.parameters(), two.parameters(), strict=True):
        assert torch.equal(a, b)
    assert loader.ledger.seen.sum() == 3 * (288 if drop_last else 300)


class Noisy(Dataset):
    """Augments with the worker's global generators, as most transforms do."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        return torch.rand(2) + random.random(), i % 4


@pytest.mark.parametrize("persistent", [False, True])
def test_observing_leaves_the_random_numbers_of_workers_as_they_were(persistent):
    def batches(make):
        loader = make(Noisy(), 8, num_workers=2, persistent_workers=persistent)
        return [x for _ in range(3) for x, _ in loader]

    plain = batches(lambda *a, **k: DataLoader(*a, shuffle=True, generator=torch.Generator().manual_seed(5), **k))
    ours = batches(lambda *a, **k: salience.Loader(*a, seed=5, **k))
    assert all(torch.equal(a, b) for a, b in zip(plain, ours, strict=True))


def test_a_generator_of_the_users_own_is_used_as_dataloader_would_use_it(problem):
    plain = DataLoader(problem, 32, shuffle=True, generator=torch.Generator().manual_seed(9))
    ours = salience.Loader(problem, 32, generator=torch.Generator().manual_seed(9))
    for _ in range(2):
        for (a, _), (b, _) in zip(plain, ours, strict=True):
            assert torch.equal(a, b)


def test_no_global_random_state_is_read_or_set(problem):
    models = [make_model(), make_model()]
    random.seed(1), np.random.seed(1), torch.manual_seed(1)  # noqa: NPY002
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()  # noqa: NPY002
    loader = salience.Loader(problem, 32, epochs=4, select="default")
    train(loader, loader.loss, epochs=4, model=models[0])
    for x, _ in loader:
        loader.pick(x.sum(1).abs())
    after = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()  # noqa: NPY002
    assert before[:2] == after[:2]
    assert torch.equal(before[2], after[2])
    random.seed(2), np.random.seed(2), torch.manual_seed(2)  # noqa: NPY002
    again = salience.Loader(problem, 32, epochs=4, select="default")
    train(again, again.loss, epochs=4, model=models[1])
    assert torch.equal(models[0].weight, models[1].weight)  # same seed, same run


def test_selecting_visits_what_the_plan_says_and_every_epoch_ends(problem):
    loader = salience.Loader(problem, 32, epochs=10, select="default")
    visits = []
    for _ in range(10):
        visits.append(0)
        for x, y in loader:
            loader.loss(F.cross_entropy(x @ torch.ones(8, 4), y, reduction="none"))
            visits[-1] += len(x)
            assert visits[-1] <= 320, "the epoch never ends"
    assert visits == [288, 288, 160, 160, 160, 160, 160, 160, 160, 320], "nothing is pruned"
    assert loader.ledger.seen.sum() == sum(visits)


def test_the_plan_gives_the_same_batches_however_often_pytorch_asks_for_its_orders():
    orders = Orders()
    orders.set(lambda number: Order(number, np.arange(number)), 5)
    first = [o.ids.tolist() for o in orders]
    half = iter(orders)
    next(half)  # PyTorch may abandon an iterator and ask for another
    assert [o.ids.tolist() for o in orders] == first == [o.ids.tolist() for o in iter(orders)]
    orders.set(lambda number: Order(number, np.zeros(1, dtype=np.int64)), 2)
    assert [o.ids.tolist() for o in half] == first[1:], "an iterator goes on with the window it began with"
    assert len(orders) == 2


def test_progress_runs_from_0_to_1_and_steps_are_known_in_advance(problem):
    loader = salience.Loader(problem, 32, epochs=10, select="epsilon_greedy")
    seen, steps = [loader.progress], 0
    for _ in range(10):
        length = len(loader)
        for number, (x, _) in enumerate(loader, 1):
            assert number <= length
            steps += 1
            loader.loss(x[:, 0])
            seen.append(loader.progress)
        assert number == length
    assert seen[0] == 0
    assert seen[-1] == pytest.approx(1)
    assert all(a < b for a, b in itertools.pairwise(seen))
    assert steps == loader.total_steps


def test_progress_reaches_1_when_the_sampler_sets_its_own_budget(problem):
    loader = salience.Loader(problem, 32, epochs=6, select="infobatch")
    assert loader.total_steps is None
    train(loader, loader.loss, epochs=6)
    assert loader.progress == pytest.approx(1)
    assert loader.ledger.seen.sum() == loader.visits_expected < 6 * 300


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_workers_of_both_kinds_deliver_the_same(problem, context):
    def ids(**more):
        loader = salience.Loader(problem, 32, epochs=3, select="default", with_ids=True, **more)
        out = []
        for _ in range(2):
            for batch_ids, (x, _y) in loader:
                assert torch.equal(x, problem.tensors[0][batch_ids])
                loader.loss(x.sum(1).abs(), ids=batch_ids)
                out.append(batch_ids.tolist())
        return out

    assert ids() == ids(num_workers=2, multiprocessing_context=context, prefetch_factor=3)


def test_batches_may_come_out_of_order_with_their_ids(problem):
    loader = salience.Loader(problem, 16, num_workers=2, in_order=False, with_ids=True)
    seen = []
    for ids, (x, _y) in loader:
        assert torch.equal(x, problem.tensors[0][ids])
        loader.loss(ids.float(), ids=ids)
        seen += ids.tolist()
    assert sorted(seen) == list(range(300))
    loader.summary()
    np.testing.assert_array_equal(loader.ledger.last_loss, np.arange(300))


def test_dict_batches_many_at_a_time_and_single_tensors(problem):
    loader = salience.Loader(Dicts(problem), 32, seed=1)
    for batch in loader:
        loader.loss(batch["index"].float(), None, batch["y"])
    loader.summary()
    np.testing.assert_array_equal(loader.ledger.last_loss, np.arange(300))
    np.testing.assert_array_equal(loader.ledger.label, problem.tensors[1])
    alone = salience.Loader(Alone(), 8)
    for x in alone:
        alone.loss(x.squeeze(1))
    alone.summary()
    np.testing.assert_array_equal(alone.ledger.last_loss, np.arange(50))


def keep_as_list(samples):
    return [s[0] for s in samples], torch.stack([s[1] for s in samples])


def test_a_collate_function_of_the_users_own_is_kept(problem):
    loader = salience.Loader(problem, 32, collate_fn=keep_as_list, num_workers=1)
    xs, y = next(iter(loader))
    assert isinstance(xs, list)
    assert len(xs) == len(y) == 32


def lookahead(loader):
    """A prefetcher as people write them: always one batch ahead."""
    held: deque = deque()
    for batch in loader:
        held.append(batch)
        if len(held) > 1:
            yield held.popleft()
    yield from held


def test_a_look_ahead_loop_without_ids_is_caught_and_with_ids_is_right(problem):
    loader = salience.Loader(problem, 32)
    with pytest.raises(LossError, match="with_ids"):
        for x, y in lookahead(loader):
            loader.loss(x.sum(1), None, y)
    loader = salience.Loader(problem, 32, epochs=5, select="infobatch", with_ids=True)
    for _ in range(5):
        for ids, (_x, y) in lookahead(loader):
            loader.loss(ids.float(), None, y, ids=ids)
    loader.summary()
    np.testing.assert_array_equal(loader.ledger.last_loss, np.arange(300))


def test_a_look_ahead_loop_is_caught_from_the_classes_alone_when_batches_have_no_clear_targets(problem):
    targets = problem.tensors[1]
    loader = salience.Loader(
        TensorDataset(problem.tensors[0], torch.arange(300), torch.arange(300)), 32, drop_last=True
    )
    with pytest.raises(LossError, match="with_ids"):
        for _ in range(2):
            for x, i, _ in lookahead(loader):
                loader.loss(x.sum(1), None, targets[i])


def test_gradient_accumulation_gives_the_gradient_of_the_large_batch(problem):
    def gradient(batch_size, parts):
        model = make_model()
        loader = salience.Loader(problem, batch_size, seed=3, drop_last=True)
        it = iter(loader)
        for _ in range(parts):
            x, y = next(it)
            (loader.loss(F.cross_entropy(model(x), y, reduction="none")) / parts).backward()
        return model.weight.grad

    torch.testing.assert_close(gradient(64, 1), gradient(16, 4))


def test_a_compiled_model_trains_as_the_eager_one(problem):
    def run(wrap):
        torch.compiler.reset()
        loader = salience.Loader(problem, 30, epochs=2, select="default")
        model = make_model()
        train(loader, loader.loss, epochs=2, model=wrap(model))
        return model.weight.detach()

    compiled = run(lambda m: torch.compile(m, backend="aot_eager"))
    torch.testing.assert_close(compiled, run(lambda m: m))


def test_weights_average_to_one_and_the_loss_is_their_weighted_sum(problem):
    loader = salience.Loader(problem, 30, epochs=5, select="infobatch", with_ids=True)
    for _ in range(3):
        for number, (ids, (x, _y)) in enumerate(loader):
            losses = x[:, 0].exp()
            got = loader.loss(losses, ids=ids)
            weights = torch.from_numpy(loader.plan.weights[30 * number : 30 * number + 30].copy())
            assert loader.plan.weights.mean() == pytest.approx(1, abs=0.05)
            torch.testing.assert_close(got, (weights * losses).sum() / len(losses))
    assert len(np.unique(loader.plan.weights)) == 2


def test_pick_chooses_a_fixed_number_by_seed_and_counts_seen_and_trained_apart(problem):
    def run(seed):
        loader = salience.Loader(problem, 30, seed=seed)
        picks = []
        for x, y in loader:
            losses = x.abs().sum(1)
            keep = loader.pick(losses, share=0.4)
            assert len(keep) == 12 == len(set(keep.tolist()))
            loss = loader.loss(losses[keep], None, y[keep])
            torch.testing.assert_close(loss, losses[keep].mean())
            picks.append(keep.tolist())
        loader.summary()
        return picks, loader.ledger

    picks, ledger = run(0)
    assert (ledger.seen == 1).all()
    assert ledger.trained.sum() == 120
    assert picks == run(0)[0]
    assert picks != run(1)[0]
    assert ledger.last_loss[ledger.trained > 0].mean() > ledger.last_loss[ledger.trained == 0].mean()


def test_a_loop_that_fetches_ahead_cannot_pick_from_the_wrong_batch(problem):
    loader = salience.Loader(problem, 30)
    it = iter(loader)
    x, _ = next(it)
    next(it)
    with pytest.raises(LossError, match="with_ids"):
        loader.pick(x.abs().sum(1))
    assert loader.ledger.seen.sum() == 0


def test_losses_that_do_not_fit_the_batch_are_refused(problem):
    loader = salience.Loader(problem, 32)
    with pytest.raises(LossError, match="before a batch"):
        loader.loss(torch.ones(32))
    _x, y = next(iter(loader))
    with pytest.raises(LossError, match="reduction='none'"):
        loader.loss(torch.tensor(1.0))
    with pytest.raises(LossError, match="31 losses for a batch of 32"):
        loader.loss(torch.ones(31))
    with pytest.raises(LossError, match=r"losses.mean\(dim=\(1, 2\)\)"):
        loader.loss(torch.ones(32, 4, 4))
    with pytest.raises(LossError, match="30 targets"):
        loader.loss(torch.ones(32), None, y[:30])
    with pytest.raises(LossError, match=r"must be \[32, classes\]"):
        loader.loss(torch.ones(32), torch.ones(32, 2, 2), y)
    with pytest.raises(LossError, match="not a batch that was delivered"):
        loader.loss(torch.ones(2), ids=torch.tensor([0, 1]))


def test_soft_targets_switch_class_statistics_off_and_that_is_said_once(problem):
    loader = salience.Loader(problem, 32)
    for x, _ in loader:
        loader.loss(x.sum(1), x[:, :4], torch.rand(len(x), 4))
    said = [e["text"] for e in loader.events.recent if e["kind"] == "warning"]
    assert len(said) == 1
    assert "class statistics" in said[0]


def test_losses_that_are_not_finite_are_reported(problem):
    loader = salience.Loader(problem, 100)
    for x, _ in loader:
        losses = x.sum(1)
        losses[0] = float("nan")
        loader.loss(losses)
    for _ in loader:
        break
    assert loader.ledger.bad.sum() == 3
    assert np.isfinite(loader.ledger.last_loss[loader.ledger.seen > 0]).all()


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"shuffle": False, "select": "default", "epochs": 3}, "leave one out"),
        ({"with_ids": True, "ids_key": "_ids"}, "choose one"),
        ({"generator": "globl"}, "must be a torch.Generator"),
        ({"generator": 3}, "generator is 3; it must be a torch.Generator"),
        ({"sampler": [1]}, "use select="),
        ({"batch_sampler": [[1]]}, "use batch_size= and select="),
        ({"num_worker": 1}, "Did you mean 'num_workers'"),
        ({"select": "default"}, "select needs epochs="),
        ({"select": "defalt", "epochs": 3}, "Did you mean 'default'"),
        ({"epochs": 0}, "epochs is 0; it must be at least 1"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"batch_size": None}, "must be an integer"),
        ({"seed": -1}, "seed is -1"),
    ],
)
def test_arguments_that_make_no_sense_say_what_to_use(problem, more, says):
    with pytest.raises(ConfigError, match=says):
        salience.Loader(problem, **more)


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"epochs": 2.5}, "epochs is 2.5; it must be an integer"),
        ({"epochs": "3"}, "epochs is '3'; it must be an integer"),
        ({"seed": None}, "seed is None; it must be an integer"),
        ({"window": 1.5}, "window is 1.5; write a number of samples"),
        ({"device": "gpu"}, "device is 'gpu'; it must be"),
        ({"sinks": "tensorboard:x"}, "sinks is 'tensorboard:x'; it must be a list"),
        ({"sinks": [3]}, "A sink is 3; it must be"),
        ({"shufle": True}, "Did you mean 'shuffle'"),
    ],
)
def test_arguments_of_the_wrong_type_are_named(problem, more, says):
    with pytest.raises(salience.ConfigError, match=re.escape(says)):
        salience.Loader(problem, 10, **more)


def test_a_report_that_cannot_be_written_says_where(problem, tmp_path):
    loader = salience.Loader(problem, 10)
    with pytest.raises(salience.StateError, match=r"cannot be written to .*: No such file or directory"):
        loader.report(tmp_path / "missing" / "report.html")


def test_data_sets_that_cannot_be_used_are_refused(problem):
    with pytest.raises(DataError, match="empty"):
        salience.Loader([], 8)
    with pytest.raises(DataError, match="no length"):
        salience.Loader(object(), 8)
    growing = list(range(10))
    loader = salience.Loader(growing, 2)
    list(loader)
    growing.append(10)
    with pytest.raises(DataError, match="had 10 samples and now has 11"):
        list(loader)


def needs_margin(view):
    return view.margin


needs_margin.__salience_card__ = salience.registry.Card(needs=("margin",))


def test_a_score_that_lacks_its_signal_says_so_at_the_first_step(problem):
    loader = salience.Loader(problem, 32, epochs=3, select={"scores": [needs_margin]})
    with pytest.raises(ConfigError, match=r"'needs_margin' reads 'margin'.*loss\(losses, logits, targets\)"):
        for x, _ in loader:
            loader.loss(x.sum(1))


def test_the_report_says_what_could_be_saved_and_what_was_never_learnt(problem):
    wrong = TensorDataset(problem.tensors[0], problem.tensors[1].clone())
    wrong.tensors[1][:6] = (wrong.tensors[1][:6] + 1) % 4
    loader = salience.Loader(wrong, 16, epochs=12)
    train(loader, loader.loss, epochs=12)
    summary = loader.summary()
    assert summary["samples"] == 300
    assert [c["samples"] for c in summary["classes"]] == np.bincount(wrong.tensors[1]).tolist()
    assert 0.3 < summary["forecast"]["saved"] < 0.6
    assert {s["id"] for s in summary["hardest"][:6]} & set(range(6))
    assert summary["suspects"]["noise_rate"] == 0, "six of 300 are too few to be told from hard ones"
    text = loader.report()
    assert "Forecast" in text
    assert "Never learnt" in text
    assert "wrong. Most certain first" not in text
    assert [event["kind"] for event in loader.events.recent][-2:] == ["findings", "observed"]


@pytest.mark.parametrize("select", ["default", "ucb", "forgetting", {"scores": ["staleness"]}])
def test_a_run_that_never_calls_loss_is_stopped_where_it_would_select_by_nothing(problem, select):
    loader = salience.Loader(problem, 32, epochs=10, select=select)
    for _ in range(2):
        assert sum(len(x) for x, _ in loader) == 288  # everything, in whole batches
    with pytest.raises(
        ConfigError, match=r"Window 2 selects \d+ samples by their losses, and none was recorded: call loss"
    ):
        next(iter(loader))


def test_a_rule_that_asks_for_no_losses_needs_none(problem):
    loader = salience.Loader(problem, 30, epochs=4, select="uniform")
    assert sum(len(x) for _ in range(4) for x, _ in loader) == 4 * 150
    assert "loader.loss" in loader.report()
    asks_another = salience.Loader(problem, 30, epochs=4, select="proxy", reference=problem.tensors[0][:, 0].abs())
    assert sum(len(x) for _ in range(4) for x, _ in asks_another) == 4 * 150


def test_a_warm_start_takes_over_what_another_run_learnt(problem, tmp_path):
    first = salience.Loader(problem, 32)
    train(first, first.loss, epochs=2)
    first.summary()
    salience.ledger.save(first.ledger, tmp_path / "l.npz")
    second = salience.Loader(problem, 32, epochs=10, select="default", ledger=tmp_path / "l.npz")
    np.testing.assert_array_equal(second.ledger.mean_loss, first.ledger.mean_loss)
    assert (second.ledger.last_seen == -1).all()


def test_a_recorded_trace_replays_the_same_batches(problem, tmp_path):
    def ids(loader):
        seen = []
        for _ in range(4):
            for i, _ in loader:
                loader.loss(i.float() % 7)
                seen.append(i.tolist())
        return seen

    recorded = ids(salience.Loader(problem, 32, epochs=4, select="default", trace=tmp_path, with_ids=True))
    replayed = salience.Loader(problem, 32, epochs=4, select=salience.Trace(tmp_path), with_ids=True)
    assert ids(replayed) == recorded


def test_iteration_from_another_thread_works(problem):
    loader, seen = salience.Loader(problem, 32), []
    thread = threading.Thread(target=lambda: seen.extend(len(x) for x, _ in loader))
    thread.start()
    thread.join()
    assert sum(seen) == 300
