"""Two ranks of one node, such as two GPUs: torchrun --nproc-per-node 2 two_ranks.py"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import salience

EPOCHS = 4

dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
g = torch.Generator().manual_seed(0)
x = torch.randn(1000, 16, generator=g)
data = TensorDataset(x, (x @ torch.randn(16, 4, generator=g)).argmax(1))
torch.manual_seed(0)
model = DistributedDataParallel(nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.3)

loader = salience.Loader(data, 32, epochs=EPOCHS, select="default")  # after init_process_group; no DistributedSampler
for _ in range(EPOCHS):
    for inputs, targets in loader:
        logits = model(inputs)
        loss = loader.loss(F.cross_entropy(logits, targets, reduction="none"), logits, targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

report = loader.report()  # on every rank
if dist.get_rank() == 0:
    print(report)
dist.barrier()
dist.destroy_process_group()
