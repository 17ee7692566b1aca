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


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_moved_ahead_are_whole_and_come_from_pinned_memory(workers: int):
    x, y = data()
    plain = list(salience.Loader(TensorDataset(x, y), SIZE))
    loader = salience.Loader(TensorDataset(x, y), SIZE, device="cuda", num_workers=workers, with_ids=True)
    assert loader.pin_memory
    seen = []
    for ids, (a, b) in loader:
        assert a.is_cuda
        assert b.is_cuda
        assert not ids.is_cuda
        torch.randn(1 << 20, device="cuda").square_()  # something that takes memory while the next batch is copied
        seen.append((a.clone(), b.clone()))
        loader.loss(a.sum(1), targets=b, ids=ids)
    for (a, b), (c, d) in zip(plain, seen, strict=True):
        assert torch.equal(a, c.cpu())
        assert torch.equal(b, d.cpu())
    assert (loader.ledger.seen == 1).all()


@pytest.mark.parametrize("ignored", [-100, -1, 255])
def test_targets_without_a_class_trip_no_device_assert(ignored: int):
    x, y = data()
    y[::3] = ignored
    net = torch.nn.Linear(16, 4).cuda()
    loader = salience.Loader(TensorDataset(x, y), SIZE, device="cuda")
    for a, b in loader:
        logits = net(a)
        losses = F.cross_entropy(logits, b, reduction="none", ignore_index=ignored)
        torch.cuda.set_sync_debug_mode("error")
        try:
            loader.loss(losses, logits, b)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert (loader.ledger.label[::3] == -1).all()
    assert (loader.ledger.label[1::3] >= 0).all()
