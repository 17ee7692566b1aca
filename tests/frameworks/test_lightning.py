"""Lightning on a Loader: every batch of every plan is trained on, checkpoints go on with the ledger, schedules end at 0."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, RandomSampler, WeightedRandomSampler

if os.environ.get("CI") != "true":  # there nothing may be skipped
    pytest.importorskip("lightning")

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint
from pl_problem import Module, N, data, fit
from ranks_of_two import run_two

import salience
from salience.frameworks.lightning import DataMixin, Salience, as_loader

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec"),  # Lightning's own, with this torch
    pytest.mark.filterwarnings("ignore:You defined a .validation_step"),
]
LEDGER = ("last_loss", "mean_loss", "seen", "trained", "label", "margin")
HERE = Path(__file__).parent


def weight(module):
    return module.model.weight.detach()


def by_hand(epochs, batch_size, select=None):
    """The plain loop with a Loader."""
    loader, module = salience.Loader(data(), batch_size, epochs=epochs, select=select), Module()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.2)
    schedule = salience.ProgressLR(optimizer, loader, "linear")
    for _ in range(epochs):
        for x, y in loader:
            logits = module.model(x)
            loss = loader.loss(F.cross_entropy(logits, y, reduction="none"), logits, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    return module, loader


@pytest.mark.parametrize("select", [None, "default"])
@pytest.mark.parametrize("workers", [0, 2])
def test_it_trains_as_the_plain_loop_does_bit_for_bit(select, workers):
    train = DataLoader(data(), 8, shuffle=True, num_workers=workers)
    run, module, callback = fit(8, 8, options={"select": select, "seed": 0}, train=train)
    other, loader = by_hand(8, 8, select)
    torch.testing.assert_close(weight(module), weight(other), rtol=0, atol=0)
    for name in LEDGER:
        np.testing.assert_array_equal(callback.loader.ledger[name], loader.ledger[name], err_msg=name)
    assert callback.loader.visits == loader.visits == callback.loader.ledger.seen.sum()
    assert callback.loader.progress == 1
    assert run.lr_scheduler_configs[0].scheduler.get_last_lr() == [0.0]
    assert run.current_epoch == 8


class Dropout(Module):
    """With dropout, which draws from the global generator, and Lightning alone if there is no callback."""

    def __init__(self, observes: bool) -> None:
        super().__init__()
        self.observes, self.dropout = observes, torch.nn.Dropout(0.3)

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self.dropout(self.model(x))
        losses = F.cross_entropy(logits, y, reduction="none")
        return self.salience.loss(losses, logits, y) if self.observes else losses.mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.2)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("own", ["none", "loader", "sampler", "order of the data set"])
def test_observing_leaves_lightnings_own_run_as_it_is(own, workers):
    """Order and dropout, whichever generators the DataLoader has; 60 is no whole number of batches."""

    def run(observes):
        train, g, module = data(60), torch.Generator().manual_seed(7), Dropout(observes)
        ways = {
            "none": {"shuffle": True}, "loader": {"shuffle": True, "generator": g},
            "sampler": {"sampler": RandomSampler(train, generator=g)}, "order of the data set": {},
        }  # fmt: skip
        trainer = L.Trainer(
            accelerator="cpu", devices=1, logger=False, enable_progress_bar=False, enable_model_summary=False,
            enable_checkpointing=False, max_epochs=4, callbacks=[Salience()] if observes else [],
        )  # fmt: skip
        trainer.fit(module, DataLoader(train, 8, num_workers=workers, **ways[own]), DataLoader(data(32), 16))
        return weight(module), torch.rand(1)

    with torch.random.fork_rng():
        plain, observed = run(False), run(True)
    torch.testing.assert_close(plain, observed, rtol=0, atol=0)


def test_a_run_that_is_counted_in_steps_selects_over_them_and_its_schedule_ends_at_zero():
    run, module, callback = fit(-1, 8, options={"select": "uniform"}, max_steps=21)
    assert run.global_step == len(module.rates) == 21
    assert callback.loader.visits == callback.loader.ledger.seen.sum() == 21 * 8
    assert callback.loader.progress == 1
    np.testing.assert_allclose(module.rates, 0.2 * (1 - np.arange(21) / 21))


def test_epochs_of_different_lengths_are_trained_to_their_end():
    lengths = []

    class Count(L.Callback):
        def on_train_batch_start(self, trainer, module, batch, index):
            if index == 0:
                lengths.append(0)
            lengths[-1] += 1

    _, _, callback = fit(10, 4, options={"select": "default"}, callbacks=[Count()])
    assert len(set(lengths)) > 1
    assert sum(lengths) * 4 == callback.loader.visits == callback.loader.visits_expected < 10 * N


def test_the_gradient_is_equal_at_accumulation_1_and_4():
    """64 samples, 12 a batch: groups of 48 and of 12 + 4."""
    _, one, _ = fit(2, 48, shape=lambda _: 1.0)
    _, four, callback = fit(2, 12, accumulate_grad_batches=4, shape=lambda _: 1.0)
    torch.testing.assert_close(weight(one), weight(four))
    assert callback.loader.ledger.seen.tolist() == [2] * N


SAVING = {
    "mid-epoch": {"every_n_train_steps": 11}, "last step of an epoch": {"every_n_train_steps": 8},
    "epoch end": {"every_n_epochs": 2, "save_on_train_epoch_end": True},
    "after validation": {"every_n_epochs": 1, "save_on_train_epoch_end": False},
}  # fmt: skip
OPTIONS = {"as the DataLoader": {}, "seeded": {"seed": 4}, "selecting": {"select": "default", "seed": 4}}
LOST = ("last step of an epoch", "as the DataLoader")
"""Lightning does not repeat the validation that follows, whose loader draws from the global generator."""


@pytest.mark.parametrize(
    ("saving", "options"),
    [
        pytest.param(SAVING[saving], OPTIONS[options], id=f"{saving}, {options}")
        for saving in SAVING
        for options in OPTIONS
        if (saving, options) != LOST
    ],
)
@pytest.mark.filterwarnings("ignore:.*Checkpoint directory")
def test_a_run_resumed_from_a_checkpoint_is_the_run_that_was_not_stopped(options, saving, tmp_path):
    def save():
        return ModelCheckpoint(tmp_path, save_top_k=-1, **saving)

    run, whole, first = fit(6, 8, callbacks=[save()], options=options, enable_checkpointing=True)
    checkpoint = sorted(tmp_path.glob("*.ckpt"), key=lambda path: int(path.stem.split("step=")[1].split("-")[0]))[0]
    again, resumed, second = fit(
        6, 8, callbacks=[save()], resume=checkpoint, options=options, enable_checkpointing=True
    )
    torch.testing.assert_close(weight(whole), weight(resumed), rtol=0, atol=0)
    for name in LEDGER:
        np.testing.assert_array_equal(first.loader.ledger[name], second.loader.ledger[name], err_msg=name)
    assert (run.global_step, run.current_epoch) == (again.global_step, again.current_epoch)
    assert first.loader.visits == second.loader.visits
    assert second.loader.progress == 1


def test_two_processes_train_as_one(tmp_path):
    cases = ["1:", "4:", "4:default"]
    run_two(HERE / "pl_problem.py", tmp_path, *cases)
    for case in cases:
        group, select = case.split(":")
        found = [torch.load(tmp_path / f"{case}:{rank}.pt", weights_only=True) for rank in range(2)]
        run, one, callback = fit(
            5, 16 // int(group), options={"select": select or None, "seed": 0}, accumulate_grad_batches=int(group)
        )
        torch.testing.assert_close(found[0]["parameters"], found[1]["parameters"], rtol=0, atol=0)
        torch.testing.assert_close(found[0]["parameters"], weight(one), rtol=1e-4, atol=1e-5)
        assert found[0]["steps"] == run.global_step
        seen = found[0]["loader"]["parts"]["recording"]["ledger"]["seen"].numpy()
        np.testing.assert_array_equal(seen, callback.loader.ledger.seen)


def test_validation_is_reported():
    heard = []
    sink = lambda event: heard.append(event) if event["kind"] == "evaluated" else None  # noqa: E731
    fit(3, 16, options={"monitor": "val_acc", "sinks": [sink]}, num_sanity_val_steps=1)
    assert [round(event["progress"], 4) for event in heard] == [0.3333, 0.6667, 1]
    assert all(0 <= event["metric"] <= 1 for event in heard)
    fit(1, 16, options={"monitor": "val_acc", "mode": "min", "sinks": [sink]})
    assert heard[-1]["metric"] <= 0
    with pytest.raises(salience.ConfigError, match=r"monitor is 'loss'; validation logged \['val_acc'\]"):
        fit(1, 16, options={"monitor": "loss"})


def test_a_look_at_a_batch_inside_the_epoch_does_not_count():
    class Peek(L.Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, index):
            next(iter(trainer.train_dataloader))

    _, module, _ = fit(2, 16, options={"select": "default"}, callbacks=[Peek()])
    other, _ = by_hand(2, 16, "default")
    torch.testing.assert_close(weight(module), weight(other), rtol=0, atol=0)


def test_limited_epochs_are_broken_off_and_the_next_one_begins():
    _, _, callback = fit(3, 16, limit_train_batches=2)
    assert callback.loader.visits == 3 * 2 * 16
    assert callback.loader.epoch in (2, 3)


class Data(L.LightningDataModule):
    def train_dataloader(self):
        return DataLoader(data(), 8, shuffle=True)


def test_a_data_module_with_the_mixin_gives_the_loader_itself():
    class Mine(DataMixin, Data):
        salience = {"select": "default", "epochs": 3}  # noqa: RUF012

    module, callback = Module(), Salience()
    run = L.Trainer(
        accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False, max_epochs=3,
        enable_checkpointing=False, limit_val_batches=0, callbacks=[callback],
    )  # fmt: skip
    run.fit(module, datamodule=Mine())
    torch.testing.assert_close(weight(module), weight(by_hand(3, 8, "default")[0]), rtol=0, atol=0)
    with pytest.raises(salience.ConfigError, match="belong to the salience"):
        as_loader(Mine().train_dataloader(), select="default")


class Forgets(Module):
    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.model(batch[0]), batch[1])


def test_a_training_step_that_records_nothing_is_told_early():
    def train(**options):
        callback = Salience(**options)
        run = L.Trainer(
            accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False, max_epochs=1,
            enable_checkpointing=False, callbacks=[callback],
        )  # fmt: skip
        run.fit(Forgets(), DataLoader(data(), 4, shuffle=True))
        return callback.loader

    with pytest.raises(salience.ConfigError, match=r"Forgets.training_step has recorded no loss"):
        train(select={"preset": "default", "keep": 0.5})
    with pytest.warns(UserWarning, match=r"salience: Forgets.training_step"):
        assert train().visits == N


def test_hooks_of_a_subclass_are_called():
    class Mine(Salience):
        steps = 0

        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
            self.steps += 1

    mine = Mine()
    run = L.Trainer(
        accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False, max_epochs=1,
        enable_checkpointing=False, callbacks=[mine],
    )  # fmt: skip
    run.fit(Module(), DataLoader(data(), 8, shuffle=True))
    assert mine.steps == N // 8


def test_a_dataloader_that_does_not_shuffle_is_observed_in_its_order():
    loader = as_loader(DataLoader(data(), 8))
    torch.testing.assert_close(torch.cat([x for x, _ in loader]), data().tensors[0], rtol=0, atol=0)


def test_what_cannot_be_planned_is_refused():
    with pytest.raises(salience.ConfigError, match="does not shuffle"):
        as_loader(DataLoader(data(), 8), select="default")
    with pytest.raises(salience.ConfigError, match=r"draws its own samples \(WeightedRandomSampler"):
        as_loader(DataLoader(data(), 8, sampler=WeightedRandomSampler([1.0] * N, N)))
    for sampler in (RandomSampler(data(), replacement=True), RandomSampler(data(), num_samples=N // 2)):
        with pytest.raises(salience.ConfigError, match=r"draws its own samples \(RandomSampler"):
            as_loader(DataLoader(data(), 8, sampler=sampler))
    with pytest.raises(salience.ConfigError, match="returns a list"):
        as_loader([1, 2])
    for epochs, more in ((2, {}), (-1, {"accumulate_grad_batches": 2}), (-1, {"max_steps": -1})):
        with pytest.raises(salience.ConfigError, match="set max_epochs alone, or max_steps alone"):
            fit(epochs, 8, options={"select": "default"}, **{"max_steps": 5, **more})
    with pytest.raises(salience.ConfigError, match="mode is 'up'"):
        Salience(mode="up")
    with pytest.raises(salience.ConfigError, match="no loader before"):
        Salience().loader  # noqa: B018
