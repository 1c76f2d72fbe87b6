"""The only step that runs before a worker is ready: what it leaves in torch's cache is what steps
need besides weights and KV.
"""

from __future__ import annotations

import torch

from kernels.ops import SplitWeight
from shared.engine.executors.loading.load_options import LoadOptions
from shared.engine.executors.loading.warm_up import largest_step, logprobs_step, sampled_steps
from shared.engine.executors.step_computer import StepComputer
from shared.engine.layers.linear import MatmulModule
from shared.engine.models.decoder import Decoder
from shared.engine.models.device_step import DeviceStepOutput


@torch.inference_mode()
def measure_gemms(model: Decoder) -> None:
    """Multiplies a row with a split weight of each shape: up to how many rows its kernel is the
    faster one is measured the first time, in memory that no step needs.
    """
    split = {}
    for module in model.modules():
        if isinstance(module, MatmulModule) and isinstance(weight := module.weight, SplitWeight):
            split[weight.shape, module.lanes is None] = module, weight
    for module, weight in split.values():
        module.method(torch.zeros(1, weight.shape[1], dtype=model.dtype, device=weight.device))


def run_largest_step(computer: StepComputer, options: LoadOptions) -> None:
    """Runs the largest step. Then samples an unset row with every option whose results the host
    reads, and reports the log-probabilities of as many rows as there can be.
    """
    layout, config = computer.kv_layout, computer.model.config
    num_groups = len(layout.groups)
    step = largest_step(
        layout.block_size,
        max_batch_tokens=options.max_batch_tokens,
        max_sequences=options.max_sequences,
        max_context_tokens=len(computer.model.cos),
        num_groups=num_groups,
    )
    computer.run(step)
    output = _unset_output(computer, 1)
    for each in sampled_steps(layout.block_size, config.vocab_size, num_groups=num_groups):
        computer.output(output, each)
    num_rows = len(step.query_lens)
    all_rows = logprobs_step(layout.block_size, num_rows, num_groups=num_groups)
    computer.output(_unset_output(computer, num_rows), all_rows)


@torch.inference_mode()
def _unset_output(computer: StepComputer, num_rows: int) -> DeviceStepOutput:
    """Returns the output of tokens that no layer has seen; `num_rows` of them sample."""
    model, device = computer.model, computer.kv_cache.device
    hidden = model.embed(torch.zeros(num_rows + 1, dtype=torch.int64, device=device))
    rows = hidden[:num_rows]
    return DeviceStepOutput(hidden, rows, model.logits(rows))
