"""Two real processes under Gloo: one plan, covered exactly once, one ledger, the gradient of the whole batch."""

from __future__ import annotations

import os
import socket
import traceback
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import salience

from conftest import make_model

N, EPOCHS = 203, 5  # an odd number, so that tails are uneven


def data() -> TensorDataset:
    g = torch.Generator().manual_seed(3)
    x = torch.randn(N, 8, generator=g)
    return TensorDataset(x, (x @ torch.randn(8, 4, generator=g)).argmax(1))


def work(rank: int, port: int, out: str, select: str | None, mode: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    early = salience.Loader(data(), 16, epochs=EPOCHS, with_ids=True) if mode == "early" else None
    dist.init_process_group("gloo", rank=rank, world_size=2)
    try:
        loader = early or salience.Loader(data(), 16, epochs=EPOCHS, select=select, with_ids=True)
        model = make_model()
        ddp = DistributedDataParallel(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        seen, windows = [], []
        for _ in range(EPOCHS):
            for ids, (x, y) in loader:
                logits = ddp(x)
                losses = F.cross_entropy(logits, y, reduction="none")
                if mode == "misattributed" and rank == 1 and loader.epoch == 1:
                    y = y.roll(1)  # only one rank gets it wrong; both must stop
                loss = loader.loss(losses, logits, y, None if mode == "misattributed" else ids)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                seen.append(ids.tolist())
            windows.append(loader.plan.ids.copy())
            loader.summary()
        loader.ledger.trial = np.array([[3, 5, 1, 2, 0.25, 0.5]])
        state = loader.state_dict()
        later = salience.Loader(data(), 16, epochs=EPOCHS, select=select)
        later.load_state_dict(state)
        np.savez(
            f"{out}/{rank}.npz", batches=np.array(len(seen)), ids=np.concatenate(seen), weight=model.weight.detach().numpy(),
            plans=np.concatenate(windows), state_seen=state["parts"]["recording"]["ledger"]["seen"].numpy(),
            steps=np.array(loader.total_steps or -1), resumed_course=np.array(later.ledger.course),
            resumed_trial=later.ledger.trial,
            **{f"ledger_{name}": loader.ledger[name] for name in ("mean_loss", "seen", "trained", "label", "margin")},
        )  # fmt: skip
    except Exception:
        Path(out, f"{rank}.error").write_text(traceback.format_exc())
    dist.barrier()  # nobody leaves while the other still talks
    dist.destroy_process_group()


def run(tmp_path: Path, select: str | None, mode: str = "") -> list:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    mp.spawn(work, args=(port, str(tmp_path), select, mode), nprocs=2)
    errors = {p.name: p.read_text() for p in tmp_path.glob("*.error")}
    if mode:
        return [errors.get(f"{rank}.error", "") for rank in range(2)]
    assert not errors, errors
    return [np.load(tmp_path / f"{rank}.npz") for rank in range(2)]


@pytest.mark.parametrize("select", [None, "default", "infobatch"])
def test_two_ranks_agree_on_the_plan_and_cover_it_exactly_once(tmp_path, select):
    one, two = run(tmp_path, select)
    np.testing.assert_array_equal(one["plans"], two["plans"])
    assert one["batches"] == two["batches"]
    if one["steps"] > 0:
        assert one["steps"] == one["batches"]
    assert sorted([*one["ids"], *two["ids"]]) == sorted(one["plans"])
    for name in one.files:
        if name.startswith("ledger_"):
            np.testing.assert_array_equal(one[name], two[name], err_msg=name)
    assert one["ledger_seen"].sum() == len(one["plans"])
    np.testing.assert_array_equal(one["state_seen"], one["ledger_seen"])
    np.testing.assert_array_equal(one["weight"], two["weight"])
    for rank in (one, two):  # what is not in shared memory is every rank's own
        assert len(rank["resumed_course"]) == EPOCHS - 1
        assert rank["resumed_trial"].tolist() == [[3, 5, 1, 2, 0.25, 0.5]]


def test_two_ranks_train_as_one_process_with_the_global_batch(tmp_path):
    """The plans of the two-rank run, replayed alone with twice the batch, give the same parameters."""
    one, _ = run(tmp_path, "infobatch")
    loader = salience.Loader(data(), 32, epochs=EPOCHS, select="infobatch")
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(EPOCHS):
        for x, y in loader:
            logits = model(x)
            loss = loader.loss(F.cross_entropy(logits, y, reduction="none"), logits, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    torch.testing.assert_close(model.weight.detach(), torch.from_numpy(one["weight"]), atol=1e-5, rtol=1e-4)


def test_trouble_on_one_rank_stops_both(tmp_path):
    errors = run(tmp_path, None, mode="misattributed")
    assert all("Misattributed" in error for error in errors)
    assert "Another rank" in errors[0]
    assert "with_ids" in errors[1]


def test_a_loader_made_before_the_process_group_is_refused(tmp_path):
    errors = run(tmp_path, None, mode="early")
    assert all("made before init_process_group()" in error for error in errors)
