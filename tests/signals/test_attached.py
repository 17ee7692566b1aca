"""Through a real training loop: the ledger's grad_norm is |d l_i / d parameters| and belongs to the right sample."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

import salience
from salience.errors import ConfigError, PluginError
from salience.signals import Attached

N, B = 24, 8


def images() -> TensorDataset:
    g = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(N, 3, 8, 8, generator=g), torch.randint(0, 4, (N,), generator=g))


def net() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(1)
        return nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1, bias=False),
            nn.ReLU(inplace=True),  # changes the convolution's output in place
            nn.Conv2d(8, 8, 3, stride=2, groups=2),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(72, 16),
            nn.ReLU(inplace=True),
            nn.Linear(16, 4),
        )


def true_norms(model: nn.Module, data: TensorDataset, names: str = "") -> np.ndarray:
    """|d cross_entropy_i / d parameters| of every sample, one gradient a sample."""
    model = copy.deepcopy(model)
    x, y = data.tensors
    parameters = {name: p.detach() for name, p in model.named_parameters() if name.startswith(names)}

    def value(parameters, xi, yi):
        return F.cross_entropy(functional_call(model, parameters, (xi[None],)), yi[None])

    each = vmap(grad(value), (None, 0, 0))(parameters, x, y)
    return sum(part.flatten(1).square().sum(1) for part in each.values()).sqrt().detach().numpy()


def losses_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y, reduction="none")


def close(loader, wanted, ids=slice(None)):
    np.testing.assert_allclose(loader.ledger.grad_norm[ids], wanted[ids], rtol=2e-4)


def test_plain_training_step():
    data, model = images(), net()
    loader = salience.Loader(data, B)
    loader.attach(model, grad_norm="all")
    for x, y in loader:
        loader.loss(losses_of(model, x, y)).backward()
    close(loader, true_norms(model, data))


def test_hooks_do_not_change_the_gradients():
    data, plain, hooked = images(), net(), net()
    loaders = [salience.Loader(data, B), salience.Loader(data, B)]
    loaders[1].attach(hooked, grad_norm="all", features=True)
    for loader, model in zip(loaders, (plain, hooked), strict=True):
        for x, y in loader:
            loader.loss(losses_of(model, x, y)).backward()
    for one, two in zip(plain.parameters(), hooked.parameters(), strict=True):
        assert torch.equal(one.grad, two.grad)


def test_weights_and_a_gradient_scaler_do_not_change_norms():
    data, model = images(), net()
    loader = salience.Loader(data, B, epochs=8, select="infobatch")
    loader.attach(model, grad_norm="all")
    weighted = False
    for _ in range(3):
        for x, y in loader:
            (1024 * loader.loss(losses_of(model, x, y))).backward()
        weighted |= bool((loader.plan.weights != 1).any())
    assert weighted
    close(loader, true_norms(model, data))


def muting(view):
    """Looks at even samples without learning from them."""
    return salience.select.Verdict(factor=(np.arange(view.n) % 2).astype(np.float32), reason="even")


def test_muted_samples_are_not_recorded():
    data, model = images(), net()
    select = salience.SelectConfig(
        filters=(salience.Use(name=muting),), keep=salience.Use(name="constant", options={"share": 0.99})
    )
    loader = salience.Loader(data, B, epochs=1, select=select, strict=True)
    loader.attach(model, grad_norm="all")
    for x, y in loader:
        loader.loss(losses_of(model, x, y)).backward()
    ledger = loader.ledger
    muted = loader.plan.ids[loader.plan.weights == 0]
    trained = loader.plan.ids[loader.plan.weights > 0]
    assert len(muted)
    assert len(trained)
    assert np.isnan(ledger.grad_norm[muted]).all()
    close(loader, true_norms(model, data), trained)


@pytest.mark.parametrize("again", [False, True])
def test_pick_records_the_kept_ones_alone(again):
    data, model = images(), net()
    loader = salience.Loader(data, B, with_ids=True)
    loader.attach(model, grad_norm="all")
    kept = []
    for ids, (x, y) in loader:
        if again:  # a look without gradients, then the chosen ones
            with torch.no_grad():
                keep = loader.pick(losses_of(model, x, y))
            losses = losses_of(model, x[keep], y[keep])
        else:
            losses = losses_of(model, x, y)
            keep = loader.pick(losses)
            losses = losses[keep]
        loader.loss(losses).backward()
        kept += ids[keep].tolist()
    assert sorted(np.flatnonzero(np.isfinite(loader.ledger.grad_norm))) == sorted(kept)
    close(loader, true_norms(model, data), kept)


def test_other_forward_passes_are_not_taken_for_the_batch():
    data, model = images(), net()
    loader = salience.Loader(data, B)
    loader.attach(model, grad_norm="all")
    other = torch.randn(B, 3, 8, 8, generator=torch.Generator().manual_seed(5))
    for x, y in loader:
        with torch.no_grad():
            model(other)
        spot = other.clone().requires_grad_()
        torch.autograd.grad(model(spot).sum(), spot)  # an attack, say: gradients of its own before the losses
        loss = loader.loss(losses_of(model, x, y))
        model(other).sum().backward()
        loss.backward()
        model(other).sum().backward()
    close(loader, true_norms(model, data))


def test_a_model_called_twice_for_a_batch_gives_the_norm_of_the_sum():
    data, model = images(), net()
    loader = salience.Loader(data, B)
    loader.attach(model, grad_norm="all")
    for x, y in loader:
        loader.loss(losses_of(model, x, y) + losses_of(model, x, y)).backward()
    close(loader, 2 * true_norms(model, data))


def test_a_step_without_backward_leaves_nothing_and_moves_nothing():
    data, model = images(), net()
    loader = salience.Loader(data, B, with_ids=True)
    loader.attach(model, grad_norm="all")
    skipped, trained, held = [], [], []
    for number, (ids, (x, y)) in enumerate(loader):
        losses = losses_of(model, x, y)
        held.append(weakref.ref(loader._run.sensing.attached._step))
        loss = loader.loss(losses)
        if number == 1:
            skipped = ids.tolist()
        else:
            loss.backward()
            trained += ids.tolist()
        del losses, loss
    wanted = true_norms(model, data)
    close(loader, wanted, trained)
    assert np.isnan(loader.ledger.grad_norm[skipped]).all()
    assert [ref() for ref in held] == [None] * 3, "a batch's activations outlive it"


def test_one_backward_for_several_batches():
    data, model = images(), net()
    loader = salience.Loader(data, B)
    loader.attach(model, grad_norm="all")
    total = sum(loader.loss(losses_of(model, x, y)) for x, y in loader)
    total.backward()
    close(loader, true_norms(model, data))


def test_a_loop_that_fetches_ahead():
    data, model = images(), net()
    loader = salience.Loader(data, B, with_ids=True)
    loader.attach(model, grad_norm="all")
    batches = iter(loader)
    coming = next(batches)
    while coming is not None:
        (ids, (x, y)), coming = coming, next(batches, None)
        loader.loss(losses_of(model, x, y), ids=ids).backward()
    close(loader, true_norms(model, data))


def test_a_second_backward_through_the_same_losses_counts_once():
    data, model = images(), net()
    loader = salience.Loader(data, B)
    loader.attach(model, grad_norm="all")
    for x, y in loader:
        loss = loader.loss(losses_of(model, x, y))
        loss.backward(retain_graph=True)
        loss.backward()
    close(loader, true_norms(model, data))


def test_autocast():
    data, model = images(), net()
    loader = salience.Loader(data, B)
    loader.attach(model, grad_norm="all")
    for x, y in loader:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(x)
        loader.loss(F.cross_entropy(logits.float(), y, reduction="none")).backward()
    np.testing.assert_allclose(loader.ledger.grad_norm, true_norms(model, data), rtol=0.05)


def test_activation_checkpointing():
    data, model = images(), net()
    loader = salience.Loader(data, B)
    loader.attach(model, grad_norm="all")
    for x, y in loader:
        logits = model[4:](checkpoint(model[:4], x, use_reentrant=False))
        loader.loss(F.cross_entropy(logits, y, reduction="none")).backward()
    close(loader, true_norms(model, data))


def test_every_other_step():
    data, model = images(), net()
    loader = salience.Loader(data, B, with_ids=True)
    loader.attach(model, grad_norm="all", every=2)
    measured = []
    for number, (ids, (x, y)) in enumerate(loader):
        loader.loss(losses_of(model, x, y)).backward()
        measured += ids.tolist() if number % 2 == 0 else []
    assert sorted(np.flatnonzero(np.isfinite(loader.ledger.grad_norm))) == sorted(measured)


def test_last_is_the_last_layer_alone_and_the_event_says_so():
    data = images()
    model = nn.Sequential(nn.BatchNorm2d(3), nn.Conv2d(3, 4, 3), nn.Flatten(), nn.LayerNorm(144), nn.Linear(144, 4))
    model.eval()
    loader = salience.Loader(data, B)
    loader.attach(model, grad_norm="last")
    for x, y in loader:
        loader.loss(losses_of(model, x, y)).backward()
    close(loader, true_norms(model, data, "4."))
    (event,) = [event for event in loader.events.recent if event["kind"] == "signals"]
    assert event["layers"] == ["4"]
    assert event["of"] == 2
    assert event["left_out"] == ["BatchNorm2d", "LayerNorm"]
    assert "last 1 of 2" in event["text"]


class Scale(nn.Module):
    """Neither Linear nor Conv2d."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"logits": x.flatten(1)[:, :4] * self.weight}


def test_a_model_without_such_layers_is_judged_by_its_output():
    data, model = images(), Scale()
    loader = salience.Loader(data, B)
    loader.attach(model, grad_norm="auto")
    for x, y in loader:
        loader.loss(F.cross_entropy(model(x)["logits"], y, reduction="none")).backward()
    x, y = data.tensors
    p = model(x)["logits"].softmax(1)
    close(loader, (p - F.one_hot(y, 4)).norm(dim=1).detach().numpy())
    (event,) = [event for event in loader.events.recent if event["kind"] == "signals"]
    assert event["left_out"] == ["Scale"]
    assert "output" in event["text"]


def test_a_model_that_is_not_the_one_trained_is_said_once():
    data, model = images(), net()
    loader = salience.Loader(data, B)
    loader.attach(net(), grad_norm="all")
    for x, y in loader:
        loader.loss(losses_of(model, x, y)).backward()
    assert np.isnan(loader.ledger.grad_norm).all()
    assert [e["text"][:17] for e in loader.events.recent if e["kind"] == "warning"] == ["No gradient norms"]


def test_nothing_is_done_that_nobody_asked_for():
    model = net()
    loader = salience.Loader(images(), B, epochs=2, select="el2n")
    loader.attach(model)
    assert not any(module._forward_hooks for module in model.modules())


def test_detach_takes_all_hooks_off():
    model = net()
    loader = salience.Loader(images(), B)
    loader.attach(model, grad_norm="all", features=True)
    loader.attach(model, grad_norm="all", features=True)
    assert [len(module._forward_hooks) for module in model.modules()].count(1) == 4
    loader.detach()
    loader.detach()
    assert not any(module._forward_hooks for module in model.modules())


def test_hooks_neither_keep_the_loader_nor_outlive_it():
    data, model = images(), net()
    loader = salience.Loader(data, B)
    loader.attach(model, grad_norm="all")
    for x, y in loader:
        loader.loss(losses_of(model, x, y)).backward()
    gone = weakref.ref(loader)
    del loader
    gc.collect()
    assert gone() is None
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_of_the_model_is_not_observed(copied):
    data, model = images(), net()
    loader = salience.Loader(data, B)
    loader.attach(model, grad_norm="all")
    teacher = copied(model)
    for x, y in loader:
        loader.loss(losses_of(model, x, y) + 0 * losses_of(teacher, x, y)).backward()
    close(loader, true_norms(model, data))


@pytest.mark.parametrize("strict", [False, True])
def test_a_failure_does_not_stop_training(strict, monkeypatch):
    def broken(*_: object) -> Tensor:
        raise RuntimeError("out of memory")

    monkeypatch.setattr("salience.signals.attached.squared_norms", broken)  # such a fault cannot be had otherwise
    data, model = images(), net()
    loader = salience.Loader(data, B, strict=strict)
    loader.attach(model, grad_norm="all")
    if strict:
        with pytest.raises(PluginError, match="out of memory"):
            for x, y in loader:
                loader.loss(losses_of(model, x, y)).backward()
        return
    for x, y in loader:
        loader.loss(losses_of(model, x, y)).backward()
    assert [e["text"] for e in loader.events.recent if e["kind"] == "warning"] == [
        "Gradient norms failed and are off: RuntimeError('out of memory')."
    ]


def test_a_wrong_argument_is_said():
    with pytest.raises(ConfigError, match="'auto', 'all', 'last' or None"):
        Attached(net(), grad_norm="some")
    with pytest.raises(ConfigError, match="at least 1"):
        Attached(net(), grad_norm="all", every=0)


def test_grand_without_the_model_says_what_to_call():
    data, model = images(), net()
    loader = salience.Loader(data, B, epochs=4, select="grand")
    with pytest.raises(ConfigError, match=r"'grand' reads 'grad_norm'.*loader\.attach\(model\)"):
        for x, y in loader:
            loader.loss(losses_of(model, x, y))


def test_grand_keeps_the_samples_with_the_largest_gradients():
    data, model = images(), net()
    loader = salience.Loader(data, B, epochs=10, select="grand", strict=True)
    loader.attach(model)  # the parameters stay as they are, so one pass tells all
    for _ in range(3):
        for x, y in loader:
            loader.loss(losses_of(model, x, y)).backward()
    hardest = np.argsort(-loader.ledger.grad_norm)[: len(loader.plan)]
    assert len(loader.plan) == round(0.4 * N / B) * B
    assert sorted(loader.plan.ids) == sorted(hardest)


def test_selective_backprop_in_loss_records_what_it_picked():
    data, model = images(), net()
    loader = salience.Loader(data, B, epochs=1, select="selective_backprop", strict=True)
    loader.attach(model, grad_norm="all")
    for x, y in loader:
        loader.loss(losses_of(model, x, y)).backward()
    picked = np.flatnonzero(loader.ledger.trained)
    assert len(picked) == N // 2
    assert np.flatnonzero(np.isfinite(loader.ledger.grad_norm)).tolist() == picked.tolist()
    close(loader, true_norms(model, data), picked)


def test_a_resumed_run_has_the_norms_of_one_that_never_stopped():
    data = images()

    def run(state=None, stop=None):
        model, loader = net(), salience.Loader(data, B, epochs=4, select="grand", strict=True)
        if state is not None:
            loader.load_state_dict(state)
        loader.attach(model)
        steps = 0
        for _ in range(loader.epoch, 4):
            for x, y in loader:
                loader.loss(losses_of(model, x, y)).backward()
                steps += 1
                if steps == stop:
                    return loader.state_dict()
        return loader

    whole, resumed = run(), run(run(stop=5))
    np.testing.assert_array_equal(resumed.ledger.grad_norm, whole.ledger.grad_norm)
    assert np.isfinite(whole.ledger.grad_norm).all()


def test_sequences_through_attention_count_what_they_can_and_name_the_rest():
    x, y = torch.randn(N, 5, 8, generator=torch.Generator().manual_seed(0)), torch.arange(N) % 3
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    model = nn.Sequential(layer, nn.Linear(8, 3))
    loader = salience.Loader(TensorDataset(x, y), B)
    loader.attach(model, grad_norm="all")

    def losses(x, y):
        return F.cross_entropy(model(x).transpose(1, 2), y[:, None].expand(-1, 5), reduction="none").mean(1)

    for xi, yi in loader:
        loader.loss(losses(xi, yi)).backward()
    (event,) = [event for event in loader.events.recent if event["kind"] == "signals"]
    assert event["layers"] == ["0.linear1", "0.linear2", "1"]
    assert event["left_out"] == ["LayerNorm", "MultiheadAttention", "NonDynamicallyQuantizableLinear"]
    wanted = []
    parts = [p for name in event["layers"] for p in model.get_submodule(name).parameters()]
    for i in range(N):
        each = torch.autograd.grad(losses(x[i : i + 1], y[i : i + 1]).sum(), parts)
        wanted.append(sum(part.square().sum() for part in each).sqrt().item())
    close(loader, np.array(wanted))


class NoReading(TorchDispatchMode):
    """Fails where a value of a tensor, or a shape that depends on values, is asked for: on a GPU that would wait for it."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func not in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default), func
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("select", [None, "infobatch", "selective_backprop"])
def test_no_step_waits_for_the_device(select):
    data, model = images(), net()
    loader = salience.Loader(data, B, epochs=1, select=select, strict=True)
    loader.attach(model, grad_norm="all", features=True)
    batches = list(data.tensors[0].split(B)), list(data.tensors[1].split(B))
    for _, x, y in zip(loader, *batches, strict=True):
        with NoReading():
            loader.loss(losses_of(model, x, y)).backward()
            loader._run.sensing.attached.take_features()
            loader._run.sensing.take()
    assert np.isfinite(loader.ledger.grad_norm).any()
    with pytest.raises(AssertionError), NoReading():
        torch.ones(1).item()
