"""An observed model: the inputs and output gradients of its layers become per-sample gradient norms and features.

deliver(number)   a batch is on its way: later forward calls with gradients on belong to it
watch(losses)     these are its losses: no more forward calls; the backward pass will provide the gradients
take()            the batches whose backward pass has run since
"""

from __future__ import annotations

import functools
import time
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from salience.errors import ConfigError
from salience.signals.beside import WeakHook, first_tensor
from salience.signals.features import features_of
from salience.signals.ghost import STEP_OVER_FORWARD, Extent, Layer, Size, choose, size_of, squared_norms


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """The layers that gradient norms are computed from, decided at the first step."""

    grad_norm: str
    layers: tuple[str, ...]
    """Names of the layers used; empty if the model has neither Linear nor Conv2d and its output is used instead."""
    of: int
    """Number of Linear and Conv2d layers that ran on the batch."""
    share: float
    """Predicted operations as a share of those of the step."""
    left_out: tuple[str, ...]
    """Kinds of other layers with trainable parameters."""

    @property
    def text(self) -> str:
        if not self.layers:
            return f"The gradient of the model's output stands for its layers ({', '.join(self.left_out)})."
        others = f"; not in it: {', '.join(self.left_out)}" if self.left_out else ""
        return (
            f"Gradient norms are of the last {len(self.layers)} of {self.of} Linear and Conv2d layers "
            f"(about {self.share:.1%} of the step's operations){others}."
        )


@dataclass(slots=True, eq=False)
class _Call:
    """One forward call of a layer."""

    layer: Layer | None
    """None: the model itself."""
    given: Tensor
    gave: torch.Size
    taken: bool = False
    at_once: bool = False
    """True if its norm is computed as soon as the gradient arrives, which frees the input: for the layer's only call for this
    batch, with many positions. Small ones wait for `finish`, which computes them together at half the cost."""
    gradient: Tensor | None = None


@dataclass(slots=True, eq=False, weakref_slot=True)
class BackwardStep:
    """One batch on its way through the model.

    Only the hooks in its autograd graph hold it, so it disappears with the graph if there is no backward pass; the first
    gradient of the losses puts it on the list of finished batches.
    """

    done: list[BackwardStep]
    calls: dict[str, list[_Call]] = field(default_factory=dict[str, list[_Call]])
    features: Tensor | None = None
    ids: npt.NDArray[np.int64] | None = None
    kept: Tensor | None = None
    """Positions in `ids` that have losses, if only some have."""
    window: int = 0
    scale: Tensor | None = None
    """d(what was differentiated) / d(loss of the sample): weights, means and a gradient scaler in one, [B]."""
    squares: list[Tensor] = field(default_factory=list[Tensor])
    ratio: Tensor | None = None
    """Median over samples of |gradient|^2 divided by that of the last layer, once finished; None if that is not a Linear."""
    trouble: Exception | None = None
    seconds: float = 0.0

    def reached_losses(self, gradient: Tensor) -> None:
        if self.scale is None:
            self.scale = gradient.detach()
            self.done.append(self)

    def reached_layer(self, call: _Call, gradient: Tensor) -> None:
        # Not if it comes from another loss, is not wanted, or comes once more.
        if self.scale is None or not call.taken:
            return
        call.taken, call.gradient = False, gradient.detach()
        if call.at_once:
            begin = time.perf_counter()
            self._add([call])
            self.seconds += time.perf_counter() - begin

    def _add(self, calls: list[_Call]) -> None:
        """Add the squared norms of one layer; a failure must not stop the user's backward pass."""
        try:
            pairs = [(call.given, call.gradient) for call in calls if call.gradient is not None]
            layer = calls[0].layer
            self.squares.append(_of_output(pairs[-1][1]) if layer is None else squared_norms(layer, pairs))
        except Exception as error:
            self.trouble = error
        for call in calls:
            call.given = call.gradient = _NOTHING

    def finish(self) -> Tensor | None:
        """|d loss_i / d parameters|^2 times scale_i^2 for each of the losses, [B], once all gradients are there."""
        last, of_last = next(reversed(self.calls), None), None
        for name, calls in self.calls.items():
            late = [call for call in calls if not call.at_once and call.gradient is not None]
            for rows in {len(call.given) for call in late}:
                self._add([call for call in late if len(call.given) == rows])
            if name == last and len(late) == 1 and isinstance(late[0].layer, nn.Linear) and self.trouble is None:
                of_last = self.squares[-1]
        self.calls = {}
        if self.scale is None or self.ids is None or not self.squares:
            return None
        kept, whole, device = self.kept, len(self.ids), self.scale.device
        squares = [s if kept is None or len(s) != whole else s[kept.to(s.device)] for s in self.squares]
        total = functools.reduce(torch.add, [s.to(device) for s in squares])
        if of_last is not None and len(of_last) == len(total):
            self.ratio = (total / of_last.to(device).clamp_min(TINY)).median()
        return total


class Attached:
    """Hooks on a model's layers. They refer to this object weakly: it dies with its loader, and the hooks with it."""

    def __init__(
        self, model: nn.Module, *, grad_norm: Extent | None = None, every: int = 1, features: bool = False
    ) -> None:
        if grad_norm is not None and grad_norm not in get_args(Extent):
            raise ConfigError(f"grad_norm is {grad_norm!r}; allowed: {', '.join(map(repr, get_args(Extent)))} or None.")
        if every < 1:
            raise ConfigError(f"every is {every}; it must be at least 1: norms are made in one of so many steps.")
        self._extent: Extent | None = grad_norm
        self._every, self._features = every, features
        self._kinds = {
            name: type(module).__name__
            for name, module in model.named_modules()
            if any(p.requires_grad for p in module.parameters(recurse=False))
        }
        layers = {name: module for name, module in model.named_modules() if _supported(module)}
        self._whole = grad_norm is not None and not layers
        """True if the model's own output is used, for lack of layers."""
        self._chosen: frozenset[str] | None = None
        self._waiting = 0
        """Delivered batches whose losses have not arrived: more than one if a loop fetches ahead."""
        self._counts = False
        """True if norms are computed in this step."""
        self._step: BackwardStep | None = None
        self._done: list[BackwardStep] = []
        self._seen: Tensor | None = None
        """Input of the last Linear."""
        self._hooks = {
            name: module.register_forward_hook(WeakHook(self.forwarded, name))
            for name, module in ({"": model} if self._whole else layers).items()
            if grad_norm is not None or (features and isinstance(module, nn.Linear))
        }
        self._remove = weakref.finalize(self, _remove, self._hooks)
        self._remove.atexit = False

    def detach(self) -> None:
        """Remove all hooks and forget batches in progress."""
        self._remove()
        self._step = self._seen = None
        self._done.clear()

    def deliver(self, number: int) -> None:
        """A new batch: forward calls from now on belong to it."""
        self._waiting += 1
        self._counts = self._extent is not None and number % self._every == 0
        self._seen = None
        self._open()

    def _open(self) -> None:
        self._step = BackwardStep(self._done) if self._waiting and (self._counts or self._features) else None

    def forwarded(self, name: str, module: nn.Module, given: tuple[Any, ...], gave: Any) -> None:
        """Record a forward call of a layer."""
        step = self._step
        if step is None or not torch.is_grad_enabled():
            return
        output = first_tensor(gave)
        source = output if self._whole else first_tensor(given)
        if output is None or source is None:
            return
        source = source.detach()
        if self._features and isinstance(module, nn.Linear):
            step.features = source
        if self._counts and output.requires_grad and (self._chosen is None or name in self._chosen):
            call = _Call(None if self._whole else cast(Layer, module), source, output.shape)
            step.calls.setdefault(name, []).append(call)
            output.register_hook(functools.partial(step.reached_layer, call))

    def watch(
        self, losses: Tensor, ids: npt.NDArray[np.int64], kept: Tensor | None = None, *, window: int
    ) -> Choice | None:
        """Take the losses of the samples `ids` (or of the positions `kept` of them). Returns the choice if it was made now."""
        step = self._step
        self._waiting = max(0, self._waiting - 1)
        self._open()
        if step is None:
            return None
        self._seen, step.features = step.features, None
        if not self._counts or not losses.requires_grad:
            return None
        rows = (len(ids), len(losses))
        step.calls = {name: fit for name, calls in step.calls.items() if (fit := [c for c in calls if _fits(c, rows)])}
        choice = self._choose(step.calls) if self._chosen is None and step.calls else None
        step.ids, step.kept, step.window = ids, kept, window
        for name, calls in step.calls.items():
            for call in calls:
                call.taken = self._chosen is not None and name in self._chosen
                call.at_once = len(calls) == 1 and call.given.dim() > 2
        losses.register_hook(step.reached_losses)
        return choice

    def take(self) -> list[BackwardStep]:
        """The batches whose backward pass has run since the last call."""
        done = self._done.copy()
        self._done.clear()  # steps under way share the list
        return done

    def take_features(self) -> Tensor | None:
        """Penultimate features of the batch whose losses arrived last, float32 [B, 128] of norm 1; None if there are none."""
        seen, self._seen = self._seen, None
        return None if seen is None else features_of(seen)

    def _choose(self, calls: Mapping[str, list[_Call]]) -> Choice:
        """Decide which layers to use, and remove the hooks of the others."""
        assert self._extent is not None
        sizes: dict[str, Size] = {}
        for name, (call, *_) in calls.items():
            if call.layer is not None:
                sizes[name] = size_of(call.layer, call.given.shape, call.gave)
        layers = choose(sizes, self._extent) if sizes else ()
        self._chosen = frozenset(layers or calls)
        if not self._features:
            _remove({name: hook for name, hook in self._hooks.items() if name not in self._chosen})
        step = STEP_OVER_FORWARD * sum(size.forward for size in sizes.values())
        return Choice(
            grad_norm=self._extent if sizes else "output",
            layers=layers,
            of=len(sizes),
            share=sum(sizes[name].norm for name in layers) / max(1, step),
            left_out=tuple(sorted({kind for name, kind in self._kinds.items() if name not in sizes})),
        )


_NOTHING = torch.empty(0)
TINY = float(torch.finfo(torch.float32).tiny)


def _remove(hooks: Mapping[str, RemovableHandle]) -> None:
    for hook in hooks.values():
        hook.remove()


def _supported(module: nn.Module) -> bool:
    """A Linear or Conv2d whose weight is its own parameter (not computed from others)."""
    return isinstance(module, (nn.Linear, nn.Conv2d)) and isinstance(module.weight, nn.Parameter)


def _fits(call: _Call, rows: tuple[int, int]) -> bool:
    """True if the layer's input has the number of samples delivered, or the number of losses."""
    shape = call.given.shape
    axes = 4 if isinstance(call.layer, nn.Conv2d) else 2 if call.layer is not None else 1
    return len(shape) >= axes and shape[0] in rows


def _of_output(gradient: Tensor) -> Tensor:
    rows = gradient.float().reshape(len(gradient), -1)
    return torch.linalg.vecdot(rows, rows)
