"""`loss` inside a compiled step: one graph, compiled once, each batch recorded once, the gradient of eager code."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from salience.errors import LossError
from salience.ledger import Ledger, Recorder
from salience.ledger.compiled import register, weighted_sum

SIZE, BATCHES, CLASSES = 8, 5, 3


@pytest.fixture(autouse=True)
def compiler() -> Iterator[None]:
    """A compiler that starts afresh and refuses to compile twice."""
    import torch._dynamo

    torch._dynamo.reset()
    with torch._dynamo.config.patch(error_on_recompile=True):
        yield
    torch._dynamo.reset()


class Recording:
    """Records batches of a plan with weights of its own."""

    def __init__(self) -> None:
        self.n = SIZE * BATCHES
        self.recorder = Recorder(Ledger(self.n))
        self.window, self.ids = 0, np.arange(SIZE)
        self.weights = torch.linspace(0.5, 1.5, self.n)
        self.calls = 0

    def weigh(self, losses: Tensor, logits: Tensor | None, targets: Tensor | None) -> Tensor:
        self.calls += 1
        self.recorder.record(self.ids, losses, logits, targets, window=self.window)
        return self.weights[self.ids] / len(losses)

    def eager(self, losses: Tensor, logits: Tensor | None, targets: Tensor | None) -> Tensor:
        return (losses * self.weigh(losses.detach(), logits, targets)).sum()


def train(backend: str | None, *, classified: bool = True) -> tuple[Recording, nn.Module, list[float]]:
    """Two windows of training on one set of data; compiled as one graph where a backend is named."""
    g = torch.Generator().manual_seed(0)
    x, y = torch.randn(SIZE * BATCHES, 6, generator=g), torch.randint(0, CLASSES, (SIZE * BATCHES,), generator=g)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, CLASSES))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recording = Recording()
    handle = recording.handle = register(recording)

    def step(x: Tensor, y: Tensor) -> Tensor:
        logits = model(x)
        losses = F.cross_entropy(logits, y, reduction="none")
        given = (losses, logits, y) if classified else (losses, None, None)
        return weighted_sum(*given, handle) if backend else recording.eager(*given)

    fast = torch.compile(step, backend=backend, fullgraph=True) if backend else step
    seen: list[float] = []
    for recording.window in range(2):
        for ids in torch.randperm(len(x), generator=g).split(SIZE):
            recording.ids = ids.numpy()
            loss = fast(x[ids], y[ids])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seen.append(float(loss.detach()))
        recording.recorder.flush()
    return recording, model, seen


@pytest.mark.parametrize("classified", [True, False])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_step_is_one_graph_and_trains_and_records_as_eager_code_does(backend, classified):
    from torch._dynamo.utils import counters

    counters.clear()
    recording, model, losses = train(backend, classified=classified)
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]
    assert recording.calls == 2 * BATCHES == int(recording.handle.calls)
    plain, wanted, expected = train(None, classified=classified)
    assert losses == pytest.approx(expected, rel=1e-5)
    for mine, theirs in zip(model.parameters(), wanted.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)
    ledger, eager = recording.recorder.ledger, plain.recorder.ledger
    assert (ledger.seen == 2).all()
    assert (ledger.last_seen == 1).all()
    np.testing.assert_allclose(ledger.mean_loss, eager.mean_loss, rtol=1e-4)
    np.testing.assert_array_equal(ledger.guess, eager.guess)


def test_two_calls_with_the_same_inputs_are_two_recordings():
    recording = Recording()
    handle = register(recording)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def twice(losses: Tensor) -> Tensor:
        return weighted_sum(losses, None, None, handle) + weighted_sum(losses, None, None, handle)

    losses = torch.rand(SIZE, requires_grad=True)
    twice(losses).backward()
    assert recording.calls == 2
    torch.testing.assert_close(losses.grad, 2 * recording.weights[:SIZE] / SIZE)


def test_a_result_that_is_not_used_is_recorded_all_the_same():
    recording = Recording()
    handle = register(recording)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def ignored(losses: Tensor) -> Tensor:
        weighted_sum(losses, None, None, handle)
        return losses.mean()

    ignored(torch.rand(SIZE, requires_grad=True)).backward()
    assert recording.calls == 1


def test_the_operator_passes_the_checks_of_torch():
    from salience.ledger import compiled

    handle = register(recording := Recording())
    losses, logits, targets = torch.rand(SIZE), torch.randn(SIZE, CLASSES), torch.zeros(SIZE, dtype=torch.int64)
    torch.library.opcheck(compiled._weigh, (losses, logits, targets, handle.calls, handle.number))
    assert recording.calls > 0


def test_what_the_compiler_does_to_the_result_leaves_the_weights_alone():
    recording = Recording()
    recording.weigh = lambda *_: recording.weights[:SIZE]  # a view of what is kept
    handle = register(recording)
    kept = recording.weights.clone()
    torch.ops.salience.weigh(torch.ones(SIZE), torch.empty(0), torch.empty(0), *reversed(handle)).zero_()
    torch.testing.assert_close(recording.weights, kept)


def test_the_operator_keeps_nobody_alive_and_says_who_is_gone():
    handle = register(Recording())
    gc.collect()
    with pytest.raises(LossError, match="gone"):
        weighted_sum(torch.ones(SIZE), None, None, handle)


def test_weights_of_another_shape_are_refused():
    recording = Recording()
    recording.weigh = lambda *_: torch.ones(3)
    handle = register(recording)
    with pytest.raises(LossError, match="one float32 weight per loss"):
        weighted_sum(torch.ones(SIZE), None, None, handle)
