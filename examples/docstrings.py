"""A small language model on docstrings of the standard library: batches by length, losses of tokens, short ones first."""

import inspect
import json
import pathlib
import string
import textwrap

import torch
import torch.nn.functional as F
from torch import nn

import salience

members = [inspect.getmembers(module) for module in (json, pathlib, string, textwrap, inspect)]
texts = sorted({inspect.getdoc(member) or "" for module in members for _, member in module if callable(member)} - {""})
documents = [torch.tensor(list(text.encode()[:128])) for text in texts]


def pad(samples: list[torch.Tensor]) -> torch.Tensor:
    return nn.utils.rnn.pad_sequence(samples, batch_first=True)  # 0 is no byte of a text


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lstm, self.head = nn.Embedding(256, 32), nn.LSTM(32, 64, batch_first=True), nn.Linear(64, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(self.embed(tokens))[0])


torch.manual_seed(0)
lengths = [len(document) for document in documents]
short_first = {"preset": "default", "filters": [{"name": "quality", "switch": 0.5, "first": 0.3, "last": 1.0}]}
loader = salience.Loader(
    documents, batch_tokens=1024, lengths=lengths, quality=lengths, select=short_first, epochs=6, collate_fn=pad
)
model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
for epoch in range(6):
    for tokens in loader:
        logits, following = model(tokens[:, :-1]), tokens[:, 1:]
        each = F.cross_entropy(logits.transpose(1, 2), following, reduction="none")
        loss = loader.loss(each, mask=following > 0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch}: {loader.visits} visits, loss {loss:.2f}")
print(loader.report())
