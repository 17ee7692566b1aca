"""Which levers a training script leaves unused, by reading it; nothing of it is run."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from salience.errors import ConfigError

OPTIMIZERS = ("SGD", "Adam", "AdamW", "Adagrad")
"""Optimizers of torch with a fused implementation."""
CONVOLUTIONAL = ("Conv2d", "resnet", "convnext", "efficientnet", "mobilenet", "vgg", "unet", "timm", "torchvision")
"""Names that tell of convolutions over images."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Unused:
    """A lever that a script does not use."""

    line: int
    """The line where it would go; 0 = the script as a whole."""
    lever: str
    numerics: str
    """"exact", "rounding" or "lossy"."""
    advice: str


def unused_levers(text: str, name: str = "the script") -> list[Unused]:
    """The levers that a script leaves unused, in the order of its lines; none where it leaves them to `salience.tune`."""
    try:
        tree = ast.parse(text)
    except SyntaxError as cause:
        raise ConfigError(f"{name} is no Python that can be read: {cause.msg}, line {cause.lineno}.") from cause
    script = _Script(tree)
    return sorted((one for rule in RULES for one in rule(script)), key=lambda one: (one.line, one.lever))


class _Script:
    """The calls and the words of a script."""

    def __init__(self, tree: ast.Module) -> None:
        self.calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
        self.words = {word for node in ast.walk(tree) for word in _words(node)}
        self.gpu = any("cuda" in word for word in self.words)
        self.tuned = any(_called(call) == "tune" for call in self.calls)
        self.images = any(hint.lower() in word.lower() for hint in CONVOLUTIONAL for word in self.words)

    def of(self, *names: str) -> Iterator[tuple[ast.Call, dict[str, ast.expr]]]:
        """Calls of these names, with their keyword arguments; calls with **options tell nothing and are left out."""
        for call in self.calls:
            if _called(call) in names and all(one.arg is not None for one in call.keywords):
                yield call, {one.arg: one.value for one in call.keywords if one.arg is not None}

    @property
    def backward(self) -> int:
        """Line of the first backward pass; 0 = none, so that it is no training script."""
        return min((call.lineno for call in self.calls if _called(call) == "backward"), default=0)


def _called(call: ast.Call) -> str:
    return (
        call.func.attr
        if isinstance(call.func, ast.Attribute)
        else call.func.id
        if isinstance(call.func, ast.Name)
        else ""
    )


def _words(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Attribute):
        yield node.attr
    elif isinstance(node, ast.Name):
        yield node.id
    elif isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) < 100:
        yield node.value
    elif isinstance(node, ast.keyword):
        yield node.arg or ""
    elif isinstance(node, (ast.Import, ast.ImportFrom)):
        yield from (part for alias in node.names for part in alias.name.split("."))
        yield from (getattr(node, "module", None) or "").split(".")


def _optimizer(script: _Script) -> Iterator[Unused]:
    for call, given in script.of(*OPTIMIZERS):
        if not script.tuned and not {"fused", "foreach"} & given.keys():
            name = _called(call)
            yield Unused(
                line=call.lineno, lever="fused", numerics="rounding",
                advice=f"{name}(..., fused=True) updates all parameters in one operation",
            )  # fmt: skip


def _loader(script: _Script) -> Iterator[Unused]:
    for call, given in script.of("DataLoader", "Loader"):
        if "num_workers" not in given:
            yield Unused(
                line=call.lineno, lever="num_workers", numerics="exact",
                advice="num_workers=0 reads and decodes in the training process; auto=True finds a number",
            )  # fmt: skip
        elif "persistent_workers" not in given and not _is(given["num_workers"], 0):
            yield Unused(
                line=call.lineno, lever="persistent_workers", numerics="exact",
                advice="persistent_workers=True: workers are not started again in every epoch",
            )  # fmt: skip
        if script.gpu and "pin_memory" not in given and "device" not in given:
            yield Unused(
                line=call.lineno, lever="pin_memory", numerics="exact",
                advice="pin_memory=True, and .to(device, non_blocking=True): copies overlap with computing",
            )  # fmt: skip


def _model(script: _Script) -> Iterator[Unused]:
    if not script.backward or script.tuned:
        return
    if not any(_called(call) == "compile" for call in script.calls):
        yield Unused(
            line=script.backward, lever="compile", numerics="rounding",
            advice="torch.compile(model), with batches of one shape (drop_last=True)",
        )  # fmt: skip
    if script.images and not {"channels_last", "channels_last_3d"} & script.words:
        yield Unused(
            line=script.backward, lever="channels_last", numerics="rounding",
            advice="model.to(memory_format=torch.channels_last), and the images too",
        )  # fmt: skip
    if not {"autocast", "bfloat16", "bf16", "half", "GradScaler"} & script.words:
        yield Unused(
            line=script.backward, lever="bf16", numerics="lossy",
            advice='with torch.autocast(device, torch.bfloat16): around the forward pass; or tune(..., numerics="lossy")',
        )  # fmt: skip


def _gpu(script: _Script) -> Iterator[Unused]:
    if not script.backward or not script.gpu or script.tuned:
        return
    if script.images and "cudnn" not in script.words:
        yield Unused(
            line=script.backward, lever="cudnn_benchmark", numerics="rounding",
            advice="torch.backends.cudnn.benchmark = True, with batches of one shape",
        )  # fmt: skip
    if not {"allow_tf32", "set_float32_matmul_precision", "fp32_precision"} & script.words:
        yield Unused(
            line=script.backward, lever="tf32", numerics="lossy",
            advice='torch.set_float32_matmul_precision("high"), on devices since Ampere',
        )  # fmt: skip


def _gradients(script: _Script) -> Iterator[Unused]:
    for call, given in script.of("zero_grad"):
        if "set_to_none" in given and _is(given["set_to_none"], False):
            yield Unused(
                line=call.lineno, lever="set_to_none", numerics="exact",
                advice="zero_grad() without set_to_none=False frees gradients instead of filling them with zeros",
            )  # fmt: skip


RULES: tuple[Callable[[_Script], Iterator[Unused]], ...] = (_optimizer, _loader, _model, _gpu, _gradients)


def _is(node: ast.expr, value: object) -> bool:
    return isinstance(node, ast.Constant) and node.value is value
