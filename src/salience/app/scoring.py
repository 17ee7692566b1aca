"""The model and the images for `salience score`, as described by the checkpoint of a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from salience.app import checkpoint, models
from salience.app.data import Images, open_split
from salience.app.pixels import Decode
from salience.app.train import find_device
from salience.config import train_config


class Scaled(nn.Module):
    """A model with image scaling in front: uint8 in, float32 logits out. Its state is that of the model."""

    def __init__(self, model: nn.Module, pixels: Any) -> None:
        super().__init__()
        self.model = model
        self._shift, self._scale = (torch.tensor(v).reshape(1, -1, 1, 1) * 255 for v in pixels)

    def forward(self, x: Tensor) -> Tensor:
        shift, scale = self._shift.to(x.device), self._scale.to(x.device)
        return self.model((x.float() - shift) / scale).float()

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        return self.model.load_state_dict(state_dict, strict=strict, assign=assign)


def scoring_model(saved: Mapping[str, Any], device: str) -> nn.Module:
    """The model of a checkpoint, for uint8 images."""
    config = train_config(saved["config"])
    model = Scaled(
        models.seeded(config.model, len(saved["classes"]), size=config.size, seed=config.seed), saved["pixels"]
    )
    return model.to(find_device(device))


class Asked:
    """The run's training images by id: a batch (uint8 [B, 3, size, size], classes)."""

    def __init__(self, source: str, saved: Mapping[str, Any]) -> None:
        config = train_config({**saved["config"], "out": "this run"})
        data = open_split(source, size=config.size)
        checkpoint.check_fits(saved, config, data.classes, data.checksum)
        self._images = Images(data.train, Decode(config.size))

    def __call__(self, ids: npt.NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        found = self._images.__getitems__(ids.tolist())
        return torch.stack([torch.from_numpy(image) for image, _ in found]), torch.tensor([y for _, y in found])
