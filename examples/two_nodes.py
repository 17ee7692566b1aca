"""Two nodes with a slow link between them. Start it on both; ADDRESS is the first of them, and the other takes --node-rank 1:

torchrun --nnodes 2 --node-rank 0 --nproc-per-node 1 --master-addr ADDRESS --master-port 29500 two_nodes.py
"""

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
model = nn.Linear(16, 4)
ddp = DistributedDataParallel(model)
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.3)

loader = salience.Loader(data, 32, epochs=EPOCHS, select="default")  # one plan, of which each node takes its part
schedule = salience.ProgressLR(optimizer, loader, "linear")
sync = salience.sync(ddp, optimizer, loader, mode="local")  # several steps per exchange; "auto" measures the link first
for _ in range(EPOCHS):
    for inputs, targets in loader:
        logits = ddp(inputs)
        loss = loader.loss(F.cross_entropy(logits, targets, reduction="none"), logits, targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()

sync.close()  # from here on, every node has the same parameters
report = loader.report()  # on every rank
if dist.get_rank() == 0:
    torch.save(model.state_dict(), "two_nodes.pt")
    print(report)
dist.barrier()
dist.destroy_process_group()
