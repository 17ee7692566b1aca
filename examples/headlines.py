"""Headlines from a small LSTM, letter by letter: one headline is one sample, and every letter weighs the same."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

import salience

EPOCHS, PAD = 6, 0
WHO = ["city", "court", "bank", "storm", "team", "museum"]
DOES = ["opens", "delays", "wins", "loses", "plans", "denies"]
WHAT = ["new bridge", "long case", "record loan", "old harbour", "final match", "night tour"]
LINES = [f"{who} {does} {what}" for who in WHO for does in DOES for what in WHAT]
LETTERS = sorted({letter for line in LINES for letter in line})


class Headlines(Dataset):
    def __len__(self):
        return len(LINES)

    def __getitem__(self, index):
        return torch.tensor([LETTERS.index(letter) + 1 for letter in LINES[index]])


class Writer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(len(LETTERS) + 1, 32, padding_idx=PAD)
        self.lstm, self.head = nn.LSTM(32, 64, batch_first=True), nn.Linear(64, len(LETTERS) + 1)

    def forward(self, letters, state=None):
        hidden, state = self.lstm(self.embed(letters), state)
        return self.head(hidden), state


def collate(samples):
    return pad_sequence(samples, batch_first=True, padding_value=PAD)


torch.manual_seed(0)
model = Writer()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader = salience.Loader(Headlines(), 24, epochs=EPOCHS, select="infobatch", collate_fn=collate)
schedule = salience.ProgressLR(optimizer, loader, "cosine")
for _ in range(EPOCHS):
    for letters in loader:
        logits, following = model(letters[:, :-1])[0], letters[:, 1:]
        each = F.cross_entropy(logits.transpose(1, 2), following, reduction="none", ignore_index=PAD)
        counts = (following != PAD).sum(dim=1)
        loss = loader.loss(each.sum(dim=1) / counts, counts=counts)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()

text, state = "c", None
letter = torch.tensor([[LETTERS.index("c") + 1]])
for _ in range(24):
    logits, state = model(letter, state)
    letter = logits[:, -1, 1:].argmax(1, keepdim=True) + 1
    text += LETTERS[int(letter) - 1]
print(text)
print(loader.report())
