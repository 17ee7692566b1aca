"""The way a step is computed: the model and the optimizer with some levers on. Any lever can be switched between two steps."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from salience.speed.checkpointing import Unit, segmented


class Way:
    """Calls the model with the levers that are on."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, device: torch.device) -> None:
        self.model, self.optimizer, self.device = model, optimizer, device
        self.on: set[str] = set()
        """Names of the levers that are on."""
        self.segments: tuple[Sequence[Unit], Sequence[tuple[int, ...]]] = ((), ())
        """Units, and the segments of them that run under activation checkpointing."""
        self.shape: tuple[torch.Size, ...] | None = None
        """Shapes of the inputs that are compiled for; a batch of others (the last one of an epoch) runs uncompiled."""
        self._compiled: dict[str, Callable[..., Any]] = {}
        self._flags: dict[str, Callable[[bool], None]] = {
            "fused": functools.partial(self._flag, "fused"), "foreach": functools.partial(self._flag, "foreach"),
            "channels_last": self._layout, "cudnn_benchmark": self._benchmark, "tf32": self._tf32,
        }  # fmt: skip
        self._before: dict[str, Any] = {}
        """What was set before a lever was switched on."""

    def switch(self, lever: str, on: bool) -> None:
        """Turn a lever on or off, from the next step on."""
        if on == (lever in self.on):
            return
        if lever in self._flags:
            self._flags[lever](on)
        (self.on.add if on else self.on.discard)(lever)

    def __call__(self, *inputs: Any, **more: Any) -> Any:
        """The model's output for these inputs, in float32 where bfloat16 is on."""
        if "channels_last" in self.on:
            inputs, more = _mapped(inputs, _channels_last), _mapped(more, _channels_last)
        with contextlib.ExitStack() as within:
            if "bf16" in self.on:
                within.enter_context(torch.autocast(self.device.type, dtype=torch.bfloat16))
            if self.segments[1] and torch.is_grad_enabled() and self.model.training:
                within.enter_context(segmented(*self.segments))
            out = self._callable(inputs)(*inputs, **more)
        return _mapped(out, _full) if "bf16" in self.on else out

    def _callable(self, inputs: Sequence[Any]) -> Callable[..., Any]:
        name = "cuda_graphs" if "cuda_graphs" in self.on else "compile"
        if (
            name not in self.on
            or not self.model.training
            or not torch.is_grad_enabled()
            or shapes(inputs) != self.shape
        ):
            return self.model
        if name not in self._compiled:
            mode = "reduce-overhead" if name == "cuda_graphs" else None
            self._compiled[name] = torch.compile(self.model, mode=mode, dynamic=False)  # pyright: ignore[reportCallIssue,reportArgumentType]
        return self._compiled[name]

    # --- the switches ---

    def _flag(self, flag: str, on: bool) -> None:
        """The implementation of the optimizer is an option of its parameter groups, read at every step."""
        for group in self.optimizer.param_groups:
            group[flag] = True if on else None
        if flag == "fused" and on:  # which counts its steps on the device of the parameter
            for p, state in self.optimizer.state.items():
                if isinstance(step := state.get("step"), Tensor):
                    state["step"] = step.to(p.device)

    def _layout(self, on: bool) -> None:
        form = torch.channels_last if on else torch.contiguous_format
        with torch.no_grad():
            if on:
                self._before["layout"] = [p for p in self.model.parameters() if p.dim() == 4 and p.is_contiguous()]
            for p in self._before["layout"]:
                p.data = p.data.contiguous(memory_format=form)
                for name, value in self.optimizer.state.get(p, {}).items():
                    if isinstance(value, Tensor) and value.dim() == 4:
                        self.optimizer.state[p][name] = value.contiguous(memory_format=form)

    def _benchmark(self, on: bool) -> None:
        if on:
            self._before["benchmark"] = torch.backends.cudnn.benchmark
        torch.backends.cudnn.benchmark = True if on else self._before["benchmark"]

    def _tf32(self, on: bool) -> None:
        if on:
            self._before["tf32"] = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
        precision, convolutions = ("high", True) if on else self._before["tf32"]
        torch.set_float32_matmul_precision(precision)
        torch.backends.cudnn.allow_tf32 = convolutions


def shapes(inputs: Sequence[Any]) -> tuple[torch.Size, ...]:
    """The shapes of the tensors among the inputs."""
    return tuple(one.shape for one in inputs if isinstance(one, Tensor))


def _channels_last(tensor: Tensor) -> Tensor:
    images = tensor.dim() == 4 and tensor.is_floating_point()
    return tensor.contiguous(memory_format=torch.channels_last) if images else tensor


def _full(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype == torch.bfloat16 else tensor


def _mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The value with every tensor in it changed; lists, tuples and dicts are looked into."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Mapping):
        changed = {key: _mapped(one, change) for key, one in value.items()}
        if type(value) is dict:
            return changed
        try:  # a model's output that is also a mapping
            return type(value)(**changed)
        except TypeError:
            return value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_mapped(one, change) for one in value))
    if isinstance(value, (list, tuple)):
        return type(value)(_mapped(one, change) for one in value)
    return value
