"""The step before a worker is ready takes the memory that any later step may take."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from shared.engine.executors.cuda.first_step import run_largest_step
from shared.engine.executors.loading.load_options import LoadOptions
from shared.engine.executors.loading.model_loading import kv_layout_of
from shared.engine.executors.loading.warm_up import MAX_TOP_LOGPROBS
from shared.engine.executors.step_computer import StepComputer
from shared.engine.kv.kv_cache import allocate_kv_cache
from shared.engine.models.checkpoint_config import read_config
from shared.engine.models.decoder import Decoder
from shared.engine.models.device_step import DeviceStepOutput
from shared.engine.step import StepInputs
from tests.support.engine.checkpoints import write_llama

CONTEXT, NUM_ROWS = 5000, 9


@pytest.fixture
def computer(tmp_path: Path) -> StepComputer:
    write_llama(tmp_path, num_hidden_layers=1)
    config = read_config(tmp_path)
    layout = kv_layout_of(config, "float32", 16)
    model = Decoder(config, dtype=torch.float32, num_positions=CONTEXT).eval()
    return StepComputer(model, allocate_kv_cache(layout, 1, torch.device("cpu")), layout)


def test_longest_context_and_all_logprobs_of_all_rows(
    computer: StepComputer, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[StepInputs] = []
    outputs: list[tuple[DeviceStepOutput, StepInputs]] = []
    monkeypatch.setattr(computer, "run", steps.append)
    monkeypatch.setattr(computer, "output", lambda *given: outputs.append(given))
    run_largest_step(computer, LoadOptions(max_batch_tokens=40, max_sequences=NUM_ROWS))
    (step,) = steps
    assert step.query_lens.tolist() == [*[1] * 8, 40 - 8]
    assert step.context_lens[0] == CONTEXT
    assert step.block_tables.shape == (1, NUM_ROWS, -(-CONTEXT // 16))
    assert not step.block_tables.any()
    done, wanted = outputs[-1]
    assert done.logits is not None and len(done.logits) == NUM_ROWS
    for kind in (wanted.sampling.raw_logprobs, wanted.sampling.processed_logprobs):
        assert kind == dict.fromkeys(range(NUM_ROWS), MAX_TOP_LOGPROBS)
    assert np.array_equal(wanted.sampling.logits_indices, np.arange(NUM_ROWS))
