"""A model of a config with seeded random weights, made on the device, without its loader."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.gpu_kit.session import Session

if TYPE_CHECKING:
    from shared.engine.executors.step_computer import StepComputer
    from shared.engine.models.decoder import Decoder
    from shared.numerics import Mode

WEIGHT_SCALE = 0.02


def make_executor(
    session: Session, config: dict[str, Any], mode: Mode, *, num_blocks: int, num_positions: int
) -> StepComputer:
    """Returns an executor of a model with dummy weights.

    Without a device its weights are unset, in memory that nothing touches.
    """
    from shared.engine.executors.loading.model_loading import (
        empty_model,
        finish_model,
        kv_layout_of,
    )
    from shared.engine.executors.step_computer import StepComputer
    from shared.engine.kv.kv_cache import allocate_kv_cache
    from shared.engine.models.checkpoint_config import read_config

    device = session.device
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(config))
        own = read_config(folder)
        layout = kv_layout_of(own, "bfloat16", session.shapes.block_size)
        model = empty_model(folder, own, "bfloat16", device, num_positions=num_positions)
    if not session.is_dry:
        fill(model)
    finish_model(model, mode, is_compressed=False)
    return StepComputer(model, allocate_kv_cache(layout, num_blocks, device), layout)


@torch.inference_mode()
def fill(model: Decoder) -> None:
    """Norms are ones."""
    destinations = model.weight_destinations()
    device = next(iter(destinations.values())).device
    generator = torch.Generator(device).manual_seed(0)
    for name in sorted(destinations):
        weight = destinations[name]
        if weight.ndim == 1:
            weight.fill_(1.0)
        else:
            weight.normal_(0.0, WEIGHT_SCALE, generator=generator)
            weight.copy_(weight.bfloat16())  # as a checkpoint stores a router's weights, too
