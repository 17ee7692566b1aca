"""Lightning: a callback, one line in training_step, and a schedule that follows the run's progress."""

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from salience.frameworks.lightning import Salience


class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))

    def training_step(self, batch, index):
        x, y = batch
        logits = self.model(x)
        return self.salience.loss(
            F.cross_entropy(logits, y, reduction="none"), logits, y
        )  # was: F.cross_entropy(logits, y)

    def validation_step(self, batch, index):
        x, y = batch
        self.log("val_acc", (self.model(x).argmax(1) == y).float().mean())

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.3)
        return {"optimizer": optimizer, "lr_scheduler": self.salience.schedule(optimizer, "one_cycle")}


g = torch.Generator().manual_seed(0)
x = torch.randn(1000, 16, generator=g)
data = TensorDataset(x, (x @ torch.randn(16, 4, generator=g)).argmax(1))
callback = Salience(select="default", monitor="val_acc")
trainer = L.Trainer(
    max_epochs=5,
    accelerator="cpu",
    callbacks=[callback],
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
)
trainer.fit(Module(), DataLoader(data, 32, shuffle=True), DataLoader(data, 100))
print(callback.loader.report())
