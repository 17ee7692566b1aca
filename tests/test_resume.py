"""A run interrupted at any batch and resumed in a new process is the run that was never interrupted."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler

import salience
from salience.errors import StateError

from conftest import make_model, train

# One training run in a process of its own: prints ids and weights of each batch and a digest of ledger and model.
SCRIPT = """
import hashlib, json, sys
import torch, torch.nn.functional as F
import salience
from torch.utils.data import TensorDataset

select, workers, folder, resume = json.loads(sys.argv[1])
torch.set_num_threads(1)
g = torch.Generator().manual_seed(3)
x = torch.randn(120, 8, generator=g); y = (x @ torch.randn(8, 4, generator=g)).argmax(1)

def main():
    loader = salience.Loader(TensorDataset(x, y), 16, epochs=4, select=select, num_workers=workers, with_ids=True)
    model = torch.nn.Linear(8, 4)
    with torch.no_grad():
        [p.fill_(0.01) for p in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = salience.ProgressLR(optimizer, loader, "cosine")
    if resume:
        state = torch.load(f"{folder}/{resume}.pt", weights_only=True)
        loader.load_state_dict(state["loader"]); model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"]); schedule.load_state_dict(state["schedule"])
    out, done = [], 0
    for epoch in range(loader.epoch, 4):
        for ids, (a, b) in loader:
            logits = model(a)
            losses = F.cross_entropy(logits, b, reduction="none")
            loss = loader.loss(losses, logits, b, ids)
            out.append([ids.tolist(), loss.item(), optimizer.param_groups[0]["lr"]])
            optimizer.zero_grad(); loss.backward(); optimizer.step(); schedule.step()
            done += 1
            if done in (11, 16) and not resume:
                torch.save({"loader": loader.state_dict(), "model": model.state_dict(), "optimizer":
                            optimizer.state_dict(), "schedule": schedule.state_dict()}, f"{folder}/{done}.pt")
    loader.summary()
    digest = hashlib.sha256(b"".join(loader.ledger[name].tobytes() for name in loader.ledger))
    digest.update(model.weight.detach().numpy().tobytes())
    print(json.dumps([out, digest.hexdigest()]))

if __name__ == "__main__":
    main()
"""


def run(tmp_path: Path, select: str | None, workers: int, resume: int = 0) -> list:
    script = tmp_path / "run.py"
    script.write_text(SCRIPT)
    arguments = json.dumps([select, workers, str(tmp_path), resume])
    done = subprocess.run([sys.executable, str(script), arguments], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


@pytest.mark.parametrize(("select", "workers"), [(None, 2), ("default", 0), ("default", 2), ("infobatch", 0)])
def test_a_run_resumed_in_a_new_process_sees_the_same_ids_weights_and_ledger(tmp_path, select, workers):
    whole, digest = run(tmp_path, select, workers)
    for stop in (11, 16):  # in the middle of a window, and at the end of one
        rest, resumed_digest = run(tmp_path, select, workers, resume=stop)
        assert rest == whole[stop:]
        assert resumed_digest == digest


@pytest.mark.parametrize("select", [None, "default"])
def test_a_run_can_be_resumed_at_every_batch(problem, select):
    def fresh():
        return salience.Loader(problem, 64, epochs=5, select=select, with_ids=True)

    def go(loader, stop=None):
        seen = []
        for _ in range(loader.epoch, 5):
            for ids, (x, _) in loader:
                seen.append(ids.tolist())
                loader.loss(x.sum(1).exp(), ids=ids)
                if len(seen) == stop:
                    return seen, loader.state_dict()
        loader.summary()
        return seen, loader.ledger

    whole, ledger = go(fresh())
    for stop in range(1, len(whole)):
        first, state = go(fresh(), stop)
        resumed = fresh()
        resumed.load_state_dict(state)
        assert resumed.progress == pytest.approx(stop_progress(whole, stop), abs=0.2)
        second, again = go(resumed)
        assert first + second == whole, f"stopped after batch {stop}"
        for name in ledger:
            np.testing.assert_array_equal(again[name], ledger[name], err_msg=f"{name}, stopped after batch {stop}")


def stop_progress(whole: list, stop: int) -> float:
    return sum(map(len, whole[:stop])) / sum(map(len, whole))


@pytest.mark.parametrize("stop", [7, 15])
def test_persistent_workers_resume_as_they_would_have_gone_on(problem, stop):
    def fresh():
        return salience.Loader(problem, 30, epochs=4, num_workers=1, persistent_workers=True, with_ids=True)

    def go(loader, stop=None):
        seen = []
        for _ in range(loader.epoch, 4):
            for ids, _ in loader:
                seen.append(ids.tolist())
                if len(seen) == stop:
                    return seen, loader.state_dict()
        return seen, None

    whole, _ = go(fresh())
    first, state = go(fresh(), stop)
    resumed = fresh()
    resumed.load_state_dict(state)
    assert first + go(resumed)[0] == whole


def test_batches_delivered_out_of_order_are_not_delivered_again(problem):
    loader = salience.Loader(problem, 20, num_workers=2, in_order=False, with_ids=True)
    seen, it = [], iter(loader)
    for _ in range(6):
        seen += next(it)[0].tolist()
    state = loader.state_dict()
    del it
    resumed = salience.Loader(problem, 20, num_workers=2, in_order=False, with_ids=True)
    resumed.load_state_dict(state)
    for ids, _ in resumed:
        seen += ids.tolist()
    assert sorted(seen) == list(range(300))


def test_state_survives_a_file_without_pickle(problem, tmp_path):
    loader = salience.Loader(problem, 32, epochs=4, select="default")
    train(loader, loader.loss, epochs=2)
    torch.save(loader.state_dict(), tmp_path / "s.pt")
    state = torch.load(tmp_path / "s.pt", weights_only=True)
    again = salience.Loader(problem, 32, epochs=4, select="default")
    again.load_state_dict(state)
    one, two = (train(x, x.loss, epochs=2, model=make_model()) for x in (loader, again))
    assert torch.equal(one.weight, two.weight)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"batch_size": 16}, "batch_size 32, this run has 16"),
        ({"seed": 4}, "seed 0, this run has 4"),
        ({"select": None}, "same select"),
        ({"dataset": list(range(299))}, "population 300, this run has 299"),
    ],
)
def test_state_of_another_run_is_refused(problem, change, says):
    state = salience.Loader(problem, 32, epochs=4, select="default").state_dict()
    arguments = {"dataset": problem, "batch_size": 32, "epochs": 4, "select": "default"} | change
    with pytest.raises(StateError, match=says):
        salience.Loader(**arguments).load_state_dict(state)
    with pytest.raises(StateError, match="version"):
        salience.Loader(problem, 32).load_state_dict({"version": 99})


@pytest.mark.parametrize("workers", [0, 1])
def test_a_sampler_with_a_generator_of_its_own_is_followed_and_resumed(workers):
    """Twelve samples in batches of 5: an epoch, its second batch, and the epoch after it."""
    x = torch.arange(12)

    def generators():
        return torch.Generator().manual_seed(1), torch.Generator().manual_seed(2)

    first, own = generators()
    plain = DataLoader(x, 5, sampler=RandomSampler(x, generator=own), generator=first, num_workers=workers)
    expected = [batch.tolist() for _ in range(3) for batch in plain]
    loader = salience.Loader(x, 5, generator=generators(), num_workers=workers)
    batches = iter(loader)
    found = [next(batches).tolist() for _ in range(2)]
    state = loader.state_dict()
    resumed = salience.Loader(x, 5, generator=generators(), num_workers=workers)
    resumed.load_state_dict(state)
    found += [batch.tolist() for _ in range(3) for batch in resumed]
    assert found == expected
