"""The only step that runs before a worker is ready: what it leaves in torch's cache is what steps
need besides weights and KV.
"""

from __future__ import annotations

import torch

from shared.engine.models.device_step import DeviceStepOutput
from shared.engine.runners.model_loading import LoadOptions
from shared.engine.runners.model_runner import ModelExecutor
from shared.engine.runners.warm_up import largest_step, sampled_steps


def run_largest_step(executor: ModelExecutor, options: LoadOptions) -> None:
    """Also draws with every option of sampling, whose results the host reads."""
    layout, config = executor.kv_layout, executor.model.config
    num_groups = len(layout.groups)
    step = largest_step(
        layout.block_size,
        max_batch_tokens=options.max_batch_tokens,
        max_sequences=options.max_sequences,
        num_groups=num_groups,
    )
    executor.run(step)
    drawn = _unset_output(executor)
    for step in sampled_steps(layout.block_size, config.vocab_size, num_groups=num_groups):
        executor.output(drawn, step)


@torch.inference_mode()
def _unset_output(executor: ModelExecutor) -> DeviceStepOutput:
    """Of two tokens that no layer has seen, one of which samples."""
    model, device = executor.model, executor.kv_cache.device
    hidden = model.embed(torch.zeros(2, dtype=torch.int64, device=device))
    return DeviceStepOutput(hidden, hidden[:1], model.logits(hidden[:1]))
