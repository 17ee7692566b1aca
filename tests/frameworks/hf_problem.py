"""Tiny models and data for the tests of Hugging Face's Trainer; run as a script it is one rank of two."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, GPT2Config, GPT2LMHeadModel, TrainingArguments

from salience.frameworks.transformers import Trainer

N, WORDS = 64, 23
TINY: dict[str, Any] = {
    "vocab_size": WORDS, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8,
    "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "max_position_embeddings": 16,
}  # fmt: skip


class Texts(Dataset[dict[str, Any]]):
    """Sequences of 3 to 8 words; the class is that of the first word, the labels of a language model are the words."""

    def __init__(self, task: str, n: int = N) -> None:
        g = torch.Generator().manual_seed(5)
        self.task, self.words = task, torch.randint(1, WORDS, (n, 8), generator=g)
        self.lengths = torch.randint(3, 9, (n,), generator=g)

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, index: int) -> dict[str, Any]:
        words, length = self.words[index], int(self.lengths[index])
        here = torch.arange(8) < length
        labels = words[0] % 3 if self.task == "classes" else torch.where(here, words, -100)
        return {"input_ids": words * here, "attention_mask": here.long(), "labels": labels, "unused": f"text {index}"}


def make(task: str) -> Any:
    torch.manual_seed(0)
    if task == "classes":
        return BertForSequenceClassification(BertConfig(**TINY, num_labels=3))
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=WORDS, n_positions=8, n_embd=8, n_layer=1, n_head=2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
        )
    )


def arguments(out: str | Path, **more: Any) -> TrainingArguments:
    given: dict[str, Any] = {
        "optim": "sgd", "learning_rate": 0.5, "lr_scheduler_type": "linear", "max_grad_norm": 0.0, "use_cpu": True,
        "report_to": [], "disable_tqdm": True, "save_strategy": "no", "logging_strategy": "no", "seed": 1,
    }  # fmt: skip
    return TrainingArguments(str(out), **{**given, **more})


def train(
    task: str, out: str | Path, *, resume: Any = None, data: Any = None, more: dict[str, Any] | None = None, **args: Any
):
    trainer = Trainer(
        make(task), arguments(out, **args), train_dataset=Texts(task) if data is None else data, **(more or {})
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def parameters(trainer: Any) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters()])


if __name__ == "__main__":
    transformers.utils.logging.disable_progress_bar()
    out, *cases = sys.argv[1:]
    for case in cases:
        task, accumulation, select = case.split(":")
        trainer = train(
            task, out, num_train_epochs=4, per_device_train_batch_size=8 // int(accumulation),
            gradient_accumulation_steps=int(accumulation), more={"select": select or None},
        )  # fmt: skip
        found = {"loader": trainer.loader.state_dict(), "steps": trainer.state.global_step}  # collective
        torch.save({"parameters": parameters(trainer), **found}, f"{out}/{case}:{trainer.args.process_index}.pt")
