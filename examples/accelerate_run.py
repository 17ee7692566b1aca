"""Accelerate: `prepare` passes a Loader through, `device=` moves its batches, and it is saved with the rest."""

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from torch.utils.data import TensorDataset

import salience

EPOCHS = 5

g = torch.Generator().manual_seed(0)
x = torch.randn(1024, 16, generator=g)
data = TensorDataset(x, (x @ torch.randn(16, 4, generator=g)).argmax(1))

accelerator = Accelerator(gradient_accumulation_steps=2)
model = nn.Linear(16, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
loader = salience.Loader(data, 32, epochs=EPOCHS, select="default", device=accelerator.device)
schedule = salience.ProgressLR(optimizer, loader, "linear")
model, optimizer, loader = accelerator.prepare(
    model, optimizer, loader
)  # the schedule is not prepared: it counts visits
accelerator.register_for_checkpointing(loader)

for _ in range(loader.epoch, EPOCHS):
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            logits = model(inputs)
            loss = loader.loss(F.cross_entropy(logits, targets, reduction="none"), logits, targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            if accelerator.sync_gradients:
                schedule.step()
    accelerator.save_state("accelerate_run")

report = loader.report()  # on every process
accelerator.print(report)
