"""What only a GPU shows: recording a loss must not wait for the device."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

import salience

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")]

N, SIZE = 2048, 64


def data() -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    return torch.randn(N, 16, generator=g), torch.randint(0, 4, (N,), generator=g)


@pytest.mark.parametrize("select", [None, "default", "infobatch", "kakurenbo"])
def test_a_loss_through_selector_waits_for_nothing(select: str | None):
    x, y = (part.cuda() for part in data())
    net = torch.nn.Linear(16, 4).cuda()
    selector = salience.Selector(N, batch_size=SIZE, epochs=6, select=select, labels=y.cpu(), device="cuda")
    for _ in range(6):
        for ids, _ in selector:
            logits = net(x[ids])
            losses = F.cross_entropy(logits, y[ids], reduction="none")
            torch.cuda.set_sync_debug_mode("error")
            try:
                selector.loss(losses, logits, y[ids]).backward()
            finally:
                torch.cuda.set_sync_debug_mode("default")
    assert selector.ledger.seen.min() >= 1


def test_a_loss_through_loader_waits_for_nothing_and_records_what_the_cpu_records():
    x, y = data()
    torch.manual_seed(0)
    nets = [torch.nn.Linear(16, 4).to(device) for device in ("cpu", "cuda")]
    nets[1].load_state_dict(nets[0].state_dict())
    loaders = [salience.Loader(TensorDataset(x, y), SIZE, seed=0) for _ in nets]
    for net, loader, device in zip(nets, loaders, ("cpu", "cuda"), strict=True):
        for a, b in loader:
            logits, targets = net(a.to(device)), b.to(device)
            losses = F.cross_entropy(logits, targets, reduction="none")
            torch.cuda.set_sync_debug_mode("error")
            try:
                loader.loss(losses, logits, targets)
            finally:
                torch.cuda.set_sync_debug_mode("default")
    host, device = (loader.ledger for loader in loaders)
    torch.testing.assert_close(
        torch.from_numpy(host.last_loss), torch.from_numpy(device.last_loss), rtol=1e-4, atol=1e-5
    )
    assert (host.seen == device.seen).all()
