"""From the last tokens' logits and the requests' parameters to the next tokens."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from kernels.reference.sample import sample
from shared.engine.runner import SamplingInputs


def draw_tokens(logits: Tensor, inputs: SamplingInputs) -> list[int]:
    """logits [R, vocab_size] FP32, overwritten where banned -> [R] token ids."""
    if inputs.banned:
        rows, token_ids = torch.tensor(inputs.banned, device=logits.device).unbind(1)
        logits[rows, token_ids] = float("-inf")
    if not inputs.temperature.any():
        return logits.argmax(-1).tolist()
    columns = (
        inputs.temperature,
        inputs.top_k,
        inputs.top_p,
        inputs.min_p,
        inputs.seed.view(np.int64),
        inputs.choice_index,
        inputs.output_position,
    )
    on_device = [torch.from_numpy(column).to(logits.device) for column in columns]
    return sample(logits, *on_device).tolist()
