"""Hugging Face's Trainer: another import, `select=`, and it resumes with what it learnt. The model is tiny and random."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is downloaded

import torch
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, TrainingArguments

from salience.frameworks.transformers import Trainer  # was: from transformers import Trainer


class Texts(Dataset):
    def __init__(self, n=400):
        self.words = torch.randint(1, 50, (n, 12), generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return len(self.words)

    def __getitem__(self, i):
        return {"input_ids": self.words[i], "labels": self.words[i, 0] % 2, "id": i}


config = BertConfig(
    vocab_size=50, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, num_labels=2
)
args = TrainingArguments(
    "transformers_run", num_train_epochs=4, per_device_train_batch_size=16, gradient_accumulation_steps=2, learning_rate=1e-3,
    eval_strategy="epoch", save_strategy="epoch", use_cpu=not torch.cuda.is_available(), report_to=[], disable_tqdm=True,
)  # fmt: skip
trainer = Trainer(
    BertForSequenceClassification(config), args, train_dataset=Texts(), eval_dataset=Texts(100), select="default"
)
trainer.train(resume_from_checkpoint=os.path.isdir("transformers_run/checkpoint-1") or None)
print(trainer.loader.report())
