"""Each peculiarity of Llama 4 shows in its logits: without it, they are not those of transformers.

The family's other tests are in `test_families.py`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from shared.engine.executors.load import load_executor
from tests.support.engine.families import LLAMA4, Family
from tests.support.engine.steps import Blocks, prefill

PARITY = 5e-6  # of FP32
PROMPT = torch.randint(3, 199, (200,), generator=torch.Generator().manual_seed(5)).tolist()
FIRST_CHUNK = PROMPT[:15]
Checkpoint = tuple[Path, PreTrainedModel]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder = tmp_path_factory.mktemp("llama4")
    model = Family("Llama4ForCausalLM", LLAMA4).write(folder)
    return folder, model


@pytest.fixture(scope="module")
def expected(checkpoint: Checkpoint) -> Tensor:
    with torch.inference_mode():
        return checkpoint[1](torch.tensor([PROMPT])).logits[0]


def error_with(
    folder: Path, expected: Tensor, changes: dict[str, Any], dtype: str = "float32"
) -> float:
    """Relative, of the checkpoint as if its config had `changes`, for as many tokens."""
    path = folder / "config.json"
    written = path.read_text()
    config = {**json.loads(written), **changes}
    if "no_rope_layers" in changes:
        config.pop("layer_types")
    path.write_text(json.dumps(config))
    try:
        executor = load_executor(folder, dtype=dtype, kv_cache_bytes=1 << 20)
    finally:
        path.write_text(written)
    line = Blocks(executor.num_blocks).line(PROMPT[: len(expected)])
    actual = prefill(executor, line, len(expected))
    return relative_error(actual, expected)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).pow(2).mean().sqrt() / expected.pow(2).mean().sqrt())


def test_parity_holds_over_many_chunks(checkpoint: Checkpoint, expected: Tensor) -> None:
    assert error_with(checkpoint[0], expected, {}) < PARITY


@pytest.mark.parametrize(
    "changes",
    [
        {"attn_temperature_tuning": False},
        {"floor_scale": 8},
        {"attention_chunk_size": 400},
        {"attention_chunk_size": 17},
        {"use_qk_norm": False},
        {"rope_parameters": {**LLAMA4["rope_parameters"], "factor": 4.0}},
    ],
    ids=str,
)
def test_every_peculiarity_shows(
    checkpoint: Checkpoint, expected: Tensor, changes: dict[str, Any]
) -> None:
    assert error_with(checkpoint[0], expected, changes) > 1000 * PARITY


def test_rotation_of_a_layer_without_rope_shows(checkpoint: Checkpoint, expected: Tensor) -> None:
    """In the first chunk, without temperature and norms, layers differ by their rope alone."""
    folder, model = checkpoint
    for layer in model.model.layers:
        layer.self_attn.attn_temperature_tuning = False
        if hasattr(layer.self_attn, "qk_norm"):
            layer.self_attn.qk_norm = torch.nn.Identity()
    with torch.inference_mode():
        plain = model(torch.tensor([FIRST_CHUNK])).logits[0]
    same = {"attn_temperature_tuning": False, "use_qk_norm": False}
    assert error_with(folder, plain, same) < PARITY
    assert error_with(folder, plain, {**same, "no_rope_layers": [1, 1, 1, 1]}) > 1000 * PARITY


def test_norm_before_rotation_rounds_no_worse_than_after_it(tmp_path: Path) -> None:
    """In BF16, transformers normalises what the rotation has rounded; here it is the reverse."""
    model = Family("Llama4ForCausalLM", LLAMA4).write(tmp_path)
    half = type(model).from_pretrained(tmp_path, dtype=torch.bfloat16)
    with torch.inference_mode():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
        expected = model(torch.tensor([PROMPT])).logits[0]
        theirs = half(torch.tensor([PROMPT])).logits[0].float()
    of_theirs = relative_error(theirs, expected)
    assert error_with(tmp_path, expected, {}, "bfloat16") < 1.25 * of_theirs
