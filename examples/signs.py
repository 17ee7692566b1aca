"""Pictures of 24 letters, as in the alphabets of sign languages (rendered), with augmentation that spends where it pays."""

import torch
import torch.nn.functional as F
from torch.utils.data import Dataset

import salience
from salience.app.glyphs import render
from salience.app.models import build

EPOCHS = 4


class Signs(Dataset):
    """Pictures as uint8 [1, 32, 32] and their letters."""

    def __init__(self):
        found = render(1200, seed=2, classes=24)
        self.images, self.labels = torch.from_numpy(found.images).unsqueeze(1), torch.from_numpy(found.labels)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.images[index], self.labels[index]


def to_float(image):
    return image.float() / 255


def shift(image):
    """Up to three pixels in each direction; random numbers come from torch, seeded per sample and epoch."""
    dx, dy = torch.randint(-3, 4, (2,)).tolist()
    return torch.roll(image, (dx, dy), (1, 2))


torch.manual_seed(0)
stages = [salience.Stage(to_float, random=False), salience.Stage(shift, random=True)]
loader = salience.Loader(Signs(), 64, epochs=EPOCHS, select="default", augment=stages, treat="reuse")
model = build("cnn", classes=24, channels=1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
schedule = salience.ProgressLR(optimizer, loader, "one_cycle")
for _ in range(EPOCHS):
    for x, y in loader:
        logits = model(x)
        loss = loader.loss(F.cross_entropy(logits, y, reduction="none"), logits, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
print(loader.report())
