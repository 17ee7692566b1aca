"""Ghost batch norm: a large batch is normalised in parts, as small batches would be (Hoffer et al. 2017)."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from salience.errors import ConfigError

Module = TypeVar("Module", bound=nn.Module)


class GhostBatchNorm(nn.modules.batchnorm._BatchNorm):  # pyright: ignore[reportPrivateUsage]
    """Batch norm over parts of about `size` samples in training, for inputs of any dimension; its state is that of batch norm.

    Parts are as equal as possible. The running statistics move once per batch, by the mean over the parts.
    """

    def __init__(self, num_features: int, size: int = 128, **options: Any) -> None:
        """`options` are those of torch's batch norm."""
        super().__init__(num_features, **options)
        if size < 2:
            raise ConfigError(f"size is {size}; batch norm needs at least 2 samples per part.")
        self.size = size

    @classmethod
    def of(cls, norm: nn.Module, size: int) -> GhostBatchNorm:
        """In place of a batch norm: with its parameters and statistics, the same tensors."""
        assert isinstance(norm, nn.modules.batchnorm._BatchNorm)  # pyright: ignore[reportPrivateUsage]
        made = cls(
            norm.num_features, size, eps=norm.eps, momentum=norm.momentum, affine=norm.affine,
            track_running_stats=norm.track_running_stats,
        )  # fmt: skip
        made.weight, made.bias = norm.weight, norm.bias
        made.running_mean, made.running_var = norm.running_mean, norm.running_var
        made.num_batches_tracked = norm.num_batches_tracked
        return made.train(norm.training)

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")

    def forward(self, input: Tensor) -> Tensor:
        parts = len(input) // self.size
        if not self.training or parts < 2:
            return super().forward(input)
        self._check_input_dim(input)
        means, variances = self.running_mean, self.running_var
        if means is None or variances is None:
            return torch.cat([super(GhostBatchNorm, self).forward(part) for part in input.tensor_split(parts)])
        momentum = self.momentum
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            momentum = 1 / float(self.num_batches_tracked) if momentum is None else momentum
        assert momentum is not None
        out: list[Tensor] = []
        seen: list[tuple[Tensor, Tensor]] = []
        for part in input.tensor_split(parts):
            mean, variance = means.clone(), variances.clone()
            out.append(nn.functional.batch_norm(part, mean, variance, self.weight, self.bias, True, momentum, self.eps))
            seen.append((mean, variance))
        with torch.no_grad():
            means.copy_(torch.stack([mean for mean, _ in seen]).mean(0))
            variances.copy_(torch.stack([variance for _, variance in seen]).mean(0))
        return torch.cat(out)


def ghost_batch_norm(model: Module, size: int = 128) -> Module:
    """The model with every batch norm over images, sequences or vectors in parts of about `size` samples.

    Its modules are exchanged in place. Parameters and the names in its `state_dict()` stay, so that optimizers and checkpoints
    fit.
    """
    kinds = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
    if isinstance(model, kinds):
        return GhostBatchNorm.of(model, size)  # pyright: ignore[reportReturnType]
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, kinds):
                setattr(parent, name, GhostBatchNorm.of(child, size))
    return model
