"""Hugging Face's Trainer on a Loader: the gradient, visits, schedule and checkpoints are what a plain loop would have."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

if os.environ.get("CI") != "true":  # there nothing may be skipped
    pytest.importorskip("transformers")
os.environ["HF_HUB_OFFLINE"] = "1"

import transformers
from hf_problem import TINY, WORDS, N, Texts, arguments, make, parameters, train
from ranks_of_two import run_two
from transformers import BertConfig, BertForSequenceClassification, BertForTokenClassification

import salience
from salience.frameworks.losses import per_sample_losses
from salience.frameworks.transformers import Trainer, TrainerMixin

transformers.utils.logging.disable_progress_bar()
LEDGER = ("last_loss", "mean_loss", "seen", "trained", "label", "margin")
HERE = Path(__file__).parent


def assert_same_ledger(one, two):
    for name in LEDGER:
        np.testing.assert_array_equal(one.loader.ledger[name], two.loader.ledger[name], err_msg=name)


@pytest.mark.parametrize("task", ["classes", "words"])
def test_the_gradient_is_equal_at_accumulation_1_and_4(task, tmp_path):
    """And equal to that of one batch by hand, in which every item weighs the same; the Trainer counts GPT-2's first words."""
    one = train(task, tmp_path, max_steps=1, per_device_train_batch_size=16)
    four = train(task, tmp_path, max_steps=1, per_device_train_batch_size=4, gradient_accumulation_steps=4)
    torch.testing.assert_close(parameters(one), parameters(four), rtol=1e-5, atol=1e-6)

    model, data = make(task), Texts(task)
    samples = [data[int(i)] for i in one.loader.plan.ids[:16]]
    batch = {
        name: torch.stack([sample[name] for sample in samples]) for name in ("input_ids", "attention_mask", "labels")
    }
    model(**batch, num_items_in_batch=(batch["labels"] != -100).sum()).loss.backward()
    with torch.no_grad():
        by_hand = torch.cat([(p - 0.5 * p.grad).flatten() for p in model.parameters()])
    torch.testing.assert_close(parameters(one), by_hand, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("seedable", [True, False])
@pytest.mark.parametrize("task", ["classes", "words"])
def test_observing_leaves_the_trainers_own_run_as_it_is(task, seedable, workers, tmp_path):
    """Order and dropout, also of a run that was resumed in an epoch."""
    settings = {
        "num_train_epochs": 3, "save_strategy": "steps", "save_steps": 5, "dataloader_num_workers": workers,
        "accelerator_config": {"use_seedable_sampler": seedable}, "per_device_train_batch_size": 12, "learning_rate": 0.1,
        "eval_strategy": "epoch", "data_seed": 11 if workers else None,
    }  # fmt: skip

    def run(kind, out, resume=None):
        model = make(task)
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.2
        trainer = kind(model, arguments(out, **settings), train_dataset=Texts(task), eval_dataset=Texts(task, 24))
        trainer.train(resume_from_checkpoint=resume)
        return parameters(trainer), torch.rand(1)

    with torch.random.fork_rng():
        plain = run(transformers.Trainer, tmp_path / "plain")
        observed = run(Trainer, tmp_path / "observed")
        resumed = run(Trainer, tmp_path / "resumed", tmp_path / "observed" / "checkpoint-10")
    torch.testing.assert_close(plain, observed, rtol=1e-6, atol=1e-7)  # a mean of a batch, or of its samples
    torch.testing.assert_close(observed, resumed, rtol=0, atol=0)


def test_a_short_last_group_has_its_own_number_of_items(tmp_path):
    """64 samples in groups of 4 * 12: the last group is 12 and 4."""
    groups = train("words", tmp_path, num_train_epochs=1, per_device_train_batch_size=12, gradient_accumulation_steps=4)
    whole = train("words", tmp_path, num_train_epochs=1, per_device_train_batch_size=48)
    assert groups.state.global_step == whole.state.global_step == 2
    torch.testing.assert_close(parameters(groups), parameters(whole), rtol=1e-5, atol=1e-6)


def test_two_processes_train_as_one(tmp_path):
    cases = ["words:1:", "words:4:", "classes:4:default"]
    run_two(HERE / "hf_problem.py", tmp_path, *cases)
    for case in cases:
        task, accumulation, select = case.split(":")
        found = [torch.load(tmp_path / f"{case}:{rank}.pt", weights_only=True) for rank in range(2)]
        one = train(
            task, tmp_path, num_train_epochs=4, per_device_train_batch_size=16 // int(accumulation),
            gradient_accumulation_steps=int(accumulation), more={"select": select or None},
        )  # fmt: skip
        torch.testing.assert_close(found[0]["parameters"], found[1]["parameters"], rtol=0, atol=0)
        torch.testing.assert_close(found[0]["parameters"], parameters(one), rtol=1e-4, atol=1e-5)
        assert found[0]["steps"] == one.state.global_step
        seen = found[0]["loader"]["parts"]["recording"]["ledger"]["seen"].numpy()
        np.testing.assert_array_equal(seen, one.loader.ledger.seen)


def test_observing_visits_every_sample_once_per_epoch(tmp_path):
    trainer = train("classes", tmp_path, num_train_epochs=3, per_device_train_batch_size=12)
    assert trainer.loader.ledger.seen.tolist() == [3] * N
    assert trainer.state.global_step == trainer.state.max_steps == 18
    assert trainer.state.epoch == 3
    assert trainer.loader.ledger.right.sum() > 0
    assert f"{N} of {N} samples seen" in trainer.loader.report()


@pytest.mark.parametrize("accumulation", [1, 3])
def test_a_selecting_run_makes_all_its_visits_and_its_schedule_ends_at_zero(tmp_path, accumulation):
    trainer = train(
        "classes", tmp_path, num_train_epochs=8, per_device_train_batch_size=4, gradient_accumulation_steps=accumulation,
        more={"select": "default"},
    )  # fmt: skip
    loader = trainer.loader
    assert loader.progress == 1
    assert loader.visits == loader.visits_expected == loader.ledger.seen.sum() < 8 * N
    assert trainer.lr_scheduler.get_last_lr()[0] == pytest.approx(0, abs=1e-9)
    assert trainer.state.global_step == trainer.state.max_steps
    assert trainer.state.epoch == 8


@pytest.mark.parametrize("select", [None, "default"])
@pytest.mark.parametrize("saving", [{"save_strategy": "steps", "save_steps": 5}, {"save_strategy": "epoch"}])
def test_a_run_resumed_from_a_checkpoint_is_the_run_that_was_not_stopped(select, saving, tmp_path):
    settings = {
        "num_train_epochs": 4, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 2, "more": {"select": select},
        **saving,
    }  # fmt: skip
    whole = train("classes", tmp_path / "whole", **settings)
    folders = sorted((tmp_path / "whole").glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
    resumed = train("classes", tmp_path / "resumed", resume=str(folders[0]), **settings)
    torch.testing.assert_close(parameters(whole), parameters(resumed), rtol=0, atol=0)
    assert_same_ledger(whole, resumed)
    for name in ("global_step", "max_steps", "epoch"):
        assert getattr(whole.state, name) == getattr(resumed.state, name)
    assert whole.lr_scheduler.get_last_lr() == resumed.lr_scheduler.get_last_lr()


def test_a_checkpoint_of_another_trainer_is_refused(tmp_path):
    plain = transformers.Trainer(
        make("classes"), arguments(tmp_path, num_train_epochs=1, save_strategy="epoch"), train_dataset=Texts("classes")
    )
    plain.train()
    with pytest.raises(salience.StateError, match=r"There is no .*salience.pt"):
        train("classes", tmp_path, num_train_epochs=2, resume=True)


@pytest.mark.parametrize(("metric", "sign"), [(None, -1), ("accuracy", 1)])
def test_evaluations_are_reported_higher_is_better(metric, sign, tmp_path):
    heard = []
    trainer = Trainer(
        make("classes"),
        arguments(tmp_path, num_train_epochs=2, eval_strategy="epoch", metric_for_best_model=metric),
        train_dataset=Texts("classes"), eval_dataset=Texts("classes", 20),
        compute_metrics=lambda found: {"accuracy": float((found.predictions.argmax(1) == found.label_ids).mean())},
        loader_options={"sinks": [lambda event: heard.append(event) if event["kind"] == "evaluated" else None]},
    )  # fmt: skip
    trainer.train()
    name = "eval_loss" if metric is None else "eval_accuracy"
    logged = [entry[name] for entry in trainer.state.log_history if name in entry]
    assert [event["metric"] for event in heard] == pytest.approx([sign * value for value in logged], abs=1e-4)
    assert [round(event["progress"], 6) for event in heard] == [0.5, 1.0]


def test_the_users_own_subclass_keeps_its_methods(tmp_path):
    class Mine(TrainerMixin, transformers.Trainer):
        def training_step(self, *given):
            self.mine = getattr(self, "mine", 0) + 1
            return super().training_step(*given)

    trainer = Mine(make("classes"), arguments(tmp_path, num_train_epochs=1), train_dataset=Texts("classes"))
    trainer.train()
    assert trainer.mine == 8


def test_losses_of_a_task_of_ones_own(tmp_path):
    seen = []

    def per_sample(outputs, inputs):
        seen.append(len(inputs["labels"]))
        return F.cross_entropy(outputs.logits, inputs["labels"], reduction="none")

    settings = {"num_train_epochs": 1, "per_device_train_batch_size": 5, "gradient_accumulation_steps": 3}
    mine = train("classes", tmp_path, more={"per_sample": per_sample}, **settings)
    theirs = train("classes", tmp_path, **settings)
    assert sum(seen) == N
    torch.testing.assert_close(parameters(mine), parameters(theirs), rtol=1e-6, atol=1e-7)


def test_columns_the_model_does_not_take_are_left_out(tmp_path):
    datasets = pytest.importorskip("datasets")
    data = Texts("classes")
    table = datasets.Dataset.from_list(
        [{k: v if isinstance(v, str) else v.tolist() for k, v in data[i].items()} for i in range(N)]
    )
    one = train("classes", tmp_path, num_train_epochs=1)
    two = train("classes", tmp_path, num_train_epochs=1, data=table)
    torch.testing.assert_close(parameters(one), parameters(two), rtol=0, atol=0)
    assert "unused" not in two.loader.dataset.column_names


def test_what_would_be_silently_wrong_is_refused(tmp_path):
    def make_trainer(more=None, **args):
        return Trainer(make("classes"), arguments(tmp_path, **args), train_dataset=Texts("classes"), **(more or {}))

    with pytest.raises(salience.ConfigError, match="max_steps is 5"):
        make_trainer({"select": "default"}, max_steps=5)
    with pytest.raises(salience.ConfigError, match=r"num_train_epochs is 1\.5"):
        make_trainer({"select": "default"}, num_train_epochs=1.5)
    with pytest.raises(salience.ConfigError, match="per_sample="):
        make_trainer({"compute_loss_func": lambda *_, **__: 0})
    with pytest.raises(salience.ConfigError, match="'sequential'"):
        make_trainer(train_sampling_strategy="sequential")


# --- losses per sample, against what the models themselves compute ---


def check(model, inputs, **options):
    outputs = model(**inputs)
    found = per_sample_losses(outputs, inputs["labels"], **options)
    counts = torch.ones_like(found.losses) if found.counts is None else found.counts
    torch.testing.assert_close((found.losses * counts).sum() / counts.sum(), outputs.loss, rtol=1e-5, atol=1e-6)
    return found


WORD_IDS = torch.randint(1, WORDS, (6, 7), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize(
    ("labels", "settings"),
    [
        (torch.tensor([0, 1, 2, 0, 1, 2]), {"num_labels": 3}),
        (torch.rand(6, generator=torch.Generator().manual_seed(1)), {"num_labels": 1}),
        (torch.rand(6, 3, generator=torch.Generator().manual_seed(1)), {"num_labels": 3, "problem_type": "regression"}),
        (torch.eye(3).repeat(2, 1), {"num_labels": 3, "problem_type": "multi_label_classification"}),
    ],
)
def test_losses_of_sequence_classification(labels, settings):
    model = BertForSequenceClassification(BertConfig(**TINY, **settings))
    found = check(model, {"input_ids": WORD_IDS, "labels": labels}, problem=settings.get("problem_type"))
    assert (found.targets is None) == labels.is_floating_point()


def test_losses_of_tokens_masked_and_next():
    labels = WORD_IDS.clone()
    labels[0, 3:], labels[1] = -100, -100
    check(BertForTokenClassification(BertConfig(**TINY, num_labels=WORDS)), {"input_ids": WORD_IDS, "labels": labels})
    check(transformers.BertForMaskedLM(BertConfig(**TINY)), {"input_ids": WORD_IDS, "labels": labels})
    check(make("words"), {"input_ids": WORD_IDS, "labels": labels}, shift=True)
    t5 = transformers.T5Config(
        vocab_size=WORDS, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, decoder_start_token_id=0
    )
    check(transformers.T5ForConditionalGeneration(t5), {"input_ids": WORD_IDS, "labels": labels})


def test_a_model_whose_loss_is_another_one_is_refused(tmp_path):
    class Penalised(BertForSequenceClassification):
        def forward(self, input_ids=None, attention_mask=None, labels=None):
            found = super().forward(input_ids=input_ids, attention_mask=attention_mask, labels=labels)
            if found.loss is not None:
                found.loss = found.loss + 1  # a term that is not in its logits
            return found

    model = Penalised(BertConfig(**TINY, num_labels=3))
    trainer = Trainer(model, arguments(tmp_path, max_steps=1), train_dataset=Texts("classes"))
    with pytest.raises(salience.LossError, match="the model's own loss"):
        trainer.train()


def test_other_shapes_are_refused_with_a_way_out():
    with pytest.raises(salience.LossError, match="per_sample="):
        per_sample_losses({"logits": torch.zeros(2, 3, 4, 5)}, torch.zeros(2, dtype=torch.long))
    with pytest.raises(salience.LossError, match="per_sample="):
        per_sample_losses({"logits": torch.zeros(2, 3)}, None)
