"""Each peculiarity of gpt-oss shows in its logits: without it, they are not those of transformers.

The family's other tests are in `test_families.py`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from shared.engine.executors.load import load_executor
from shared.engine.executors.local_executor import LocalExecutor
from shared.engine.layers.attention import Attention
from shared.engine.layers.moe import Experts
from shared.engine.layers.norm import RMSNorm
from shared.engine.layers.router import Router
from shared.engine.models import FAMILIES as ARCHITECTURES
from shared.engine.models.checkpoint_config import read_config
from shared.errors import CheckpointError
from shared.kv_layout import Window
from tests.support.engine.families import FAMILIES, GPT_OSS, SHAPE
from tests.support.engine.steps import Blocks, prefill

PARITY = 5e-6  # of FP32
PROMPT = torch.randint(3, 199, (200,), generator=torch.Generator().manual_seed(5)).tolist()
Checkpoint = tuple[Path, PreTrainedModel]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder = tmp_path_factory.mktemp("gpt-oss")
    return folder, FAMILIES["gpt-oss"].write(folder)


@pytest.fixture(scope="module")
def expected(checkpoint: Checkpoint) -> Tensor:
    with torch.inference_mode():
        return checkpoint[1](torch.tensor([PROMPT])).logits[0]


def load(folder: Path, dtype: str = "float32") -> LocalExecutor:
    return load_executor(folder, dtype=dtype, kv_cache_bytes=1 << 20)


def logits(executor: LocalExecutor, num_tokens: int = len(PROMPT)) -> Tensor:
    line = Blocks(executor.num_blocks).line(PROMPT[:num_tokens])
    return prefill(executor, line, num_tokens)


def error(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).pow(2).mean().sqrt() / expected.pow(2).mean().sqrt())


def without_sinks(module: Attention) -> None:
    module.sinks = None


def without_output_bias(module: Attention) -> None:
    module.o_proj.bias = None


def without_router_bias(module: Router) -> None:
    module.logit_bias = None


def without_clamp(module: Experts) -> None:
    assert module.clamped_gate is not None
    module.clamped_gate = msgspec.structs.replace(module.clamped_gate, limit=1e9)


def with_another_alpha(module: Experts) -> None:
    assert module.clamped_gate is not None
    module.clamped_gate = msgspec.structs.replace(module.clamped_gate, alpha=1.0)


def with_a_common_gate(module: Experts) -> None:
    module.clamped_gate = None


def without_gate_biases(module: Experts) -> None:
    assert module.gate_up_bias is not None
    module.gate_up_bias.data = torch.zeros_like(module.gate_up_bias)


def without_down_biases(module: Experts) -> None:
    assert module.down_bias is not None
    module.down_bias.data = torch.zeros_like(module.down_bias)


CHANGES: dict[Callable[[Any], None], type] = {
    without_sinks: Attention,
    without_output_bias: Attention,
    without_router_bias: Router,
    without_clamp: Experts,
    with_another_alpha: Experts,
    with_a_common_gate: Experts,
    without_gate_biases: Experts,
    without_down_biases: Experts,
}


@pytest.mark.parametrize("change", CHANGES)
def test_model_without_a_part_differs(
    checkpoint: Checkpoint, expected: Tensor, change: Callable[[Any], None]
) -> None:
    executor = load(checkpoint[0])
    assert error(logits(executor), expected) < PARITY
    for module in executor.computer.model.modules():
        if isinstance(module, CHANGES[change]):
            change(module)
    assert error(logits(executor), expected) > 1e-3


YARN = GPT_OSS["rope_parameters"]
FIELDS: dict[str, dict[str, Any]] = {
    "no window": {"layer_types": ["full_attention"] * 4},
    "another window": {"sliding_window": 22},
    "windows in other layers": {"layer_types": ["full_attention", "sliding_attention"] * 2},
    "truncated": {"rope_parameters": {**YARN, "truncate": True}},  # type: ignore[dict-item]
    "limit": {"swiglu_limit": None},
}


@pytest.mark.parametrize("name", FIELDS)
def test_model_of_another_config_differs(
    checkpoint: Checkpoint, expected: Tensor, name: str, tmp_path: Path
) -> None:
    folder = checkpoint[0]
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    written = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(written | FIELDS[name]))
    assert error(logits(load(tmp_path)), expected) > 1e-4


def test_norms_are_rounded_after_the_product_with_their_weight(tmp_path: Path) -> None:
    """Of the first layer's, in BF16: nearer to FP32 than with the other order."""
    FAMILIES["gpt-oss"].write(tmp_path, dtype=torch.bfloat16)
    executor = load(tmp_path, "bfloat16")
    before = logits(executor, 40)
    x = torch.randn(200, 48, generator=torch.Generator().manual_seed(1)).bfloat16()
    norm = executor.computer.model.layers[0].input_layernorm
    assert isinstance(norm, RMSNorm)
    wide = x.double() / (x.double().pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
    ulps = (norm(x).double() / (wide * norm.weight.double()) - 1).abs() * 2**8
    assert ulps.max() <= 1.01
    for module in executor.computer.model.modules():
        if isinstance(module, RMSNorm):
            module.mode["is_rounded_once"] = False
    assert not torch.equal(logits(executor, 40), before)
    ulps = (norm(x).double() / (wide * norm.weight.double()) - 1).abs() * 2**8
    assert ulps.max() > 1.3


def test_every_other_layer_has_a_window(checkpoint: Checkpoint) -> None:
    config = read_config(checkpoint[0])
    reaches = [layer.reach for layer in config.layers]
    assert reaches == [Window(21), None] * 2
    published = ARCHITECTURES["GptOssForCausalLM"]({"num_hidden_layers": 24})
    assert [layer.reach for layer in published.layers] == [Window(128), None] * 12
    assert published.max_position_embeddings == 131_072
    assert published.ropes[0].attention_factor == pytest.approx(1.3466, abs=1e-4)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_experts_per_tok": 8}, "8 experts per token are more than 7 experts"),
        ({"layer_types": ["full_attention"]}, "1 layer_types for 4 layers"),
        ({"layer_types": ["chunked_attention"] * 4}, "layer type 'chunked_attention' is not"),
        ({"swiglu_limit": 0}, r"\$.swiglu_limit"),
        ({"sliding_window": 0}, r"\$.sliding_window"),
        ({"hidden_act": "relu"}, "hidden_act 'relu' is not supported"),
    ],
)
def test_bad_config_is_rejected_in_one_line(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        ARCHITECTURES["GptOssForCausalLM"]({"vocab_size": 199, **SHAPE, **GPT_OSS, **fields})
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("model.layers.1.self_attn.sinks", (4,)),
        ("model.layers.2.mlp.experts.gate_up_proj_bias", (7, 78)),
        ("model.layers.2.mlp.experts.down_proj", (7, 39, 48)),
    ],
)
def test_tensor_of_another_shape_is_named(
    checkpoint: Checkpoint, tmp_path: Path, name: str, shape: tuple[int, ...]
) -> None:
    tensors = load_file(checkpoint[0] / "model.safetensors")
    save_file({**tensors, name: torch.zeros(shape)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((checkpoint[0] / "config.json").read_bytes())
    with pytest.raises(
        CheckpointError, match=rf"tensor [\w.]*{name.split('.')[3]}[\w.]* has shape"
    ):
        load(tmp_path)
