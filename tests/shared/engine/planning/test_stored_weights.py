"""Files that contradict the config are named in one line; quantized weights count as stored."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shared.engine.models.checkpoint_config import read_config
from shared.engine.parallel.rank_part import whole_model
from shared.engine.planning.rank_bytes import num_weights
from shared.engine.planning.stored_weights import StoredWeights, read_stored
from shared.errors import CheckpointError
from tests.shared.engine.planning.sparse import write_file, write_sparse
from tests.support.engine.quantized import packed_config

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "head_dim": 32,
}
Shapes = dict[str, tuple[str, tuple[int, ...]]]


def shapes() -> Shapes:
    layer = {
        "input_layernorm.weight": (64,),
        "post_attention_layernorm.weight": (64,),
        "self_attn.q_proj.weight": (64, 64),
        "self_attn.k_proj.weight": (64, 64),
        "self_attn.v_proj.weight": (64, 64),
        "self_attn.o_proj.weight": (64, 64),
        "mlp.gate_proj.weight": (128, 64),
        "mlp.up_proj.weight": (128, 64),
        "mlp.down_proj.weight": (64, 128),
    }
    found = {f"model.layers.{index}.{name}": layer[name] for index in (0, 1) for name in layer}
    found |= {"model.embed_tokens.weight": (64, 64), "lm_head.weight": (64, 64)}
    return {name: ("BF16", shape) for name, shape in {**found, "model.norm.weight": (64,)}.items()}


DOWN = "model.layers.1.mlp.down_proj.weight"
INT4: Shapes = {
    f"{DOWN}_packed": ("I32", (64, 16)),
    f"{DOWN}_scale": ("BF16", (64, 4)),
    f"{DOWN}_shape": ("I32", (2,)),
}


QUANTIZED = {"quantization_config": packed_config(DOWN.removesuffix(".weight"))}


def read(folder: Path, changes: Shapes, *, without: str = "") -> StoredWeights:
    """With the parts of a quantized weight, the config has its format."""
    found = {**shapes(), **changes}
    found.pop(without, None)
    listed = ((name, *found[name]) for name in sorted(found))
    quantized = QUANTIZED if without == DOWN and changes else {}
    write_sparse(folder, {**CONFIG, **quantized}, listed, files=3)
    return read_stored(folder, read_config(folder))


def test_all_tensors_are_counted(tmp_path: Path) -> None:
    found, config = read(tmp_path, {}), read_config(tmp_path)
    assert (found.num_files, found.num_tensors) == (3, 21)
    assert found.num_bytes == 2 * num_weights(config, whole_model(config))


@pytest.mark.parametrize(
    ("changes", "without", "message"),
    [
        ({}, DOWN, rf"tensor {DOWN} is missing$"),
        (INT4, "", f"tensor {DOWN}_packed is not part of the model"),
        ({DOWN: ("BF16", (64, 128))}, "model.norm.weight", "model.norm.weight is missing"),
        ({f"{DOWN}_packed": INT4[f"{DOWN}_packed"]}, DOWN, f"tensor {DOWN}_scale is missing"),
        (
            {DOWN: ("BF16", (128, 64))},
            "",
            r"has shape \[128, 64\], the config requires \[64, 128\]",
        ),
        ({DOWN: ("I32", (64, 128))}, "", f"tensor {DOWN} is I32, not BF16, F16, F32"),
        (
            {**INT4, f"{DOWN}_packed": ("I32", (64, 15))},
            DOWN,
            r"has shape \[64, 15\], the config requires \[64, 16\]",
        ),
        (
            {**INT4, f"{DOWN}_scale": ("BF16", (64, 5))},
            DOWN,
            r"has shape \[64, 5\], the config requires \[64, 4\]",
        ),
        ({**INT4, f"{DOWN}_shape": ("BF16", (2,))}, DOWN, f"{DOWN}_shape is BF16, not I32, I64"),
        (
            {"norm.weight": ("BF16", (64,))},
            "",
            "tensors model.norm.weight and norm.weight are both model.norm.weight",
        ),
    ],
)
def test_contradiction_is_one_line(
    tmp_path: Path, changes: Shapes, without: str, message: str
) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        read(tmp_path, changes, without=without)
    assert "\n" not in caught.value.message


def test_bad_files_are_named(tmp_path: Path) -> None:
    read(tmp_path, {})
    config, first = read_config(tmp_path), tmp_path / "model-00001-of-00003.safetensors"

    def reason() -> str:
        with pytest.raises(CheckpointError) as caught:
            read_stored(tmp_path, config)
        assert "\n" not in caught.value.message
        return caught.value.message

    data = first.read_bytes()
    first.write_bytes(data[:-1])
    assert reason().startswith(f"{first}: incomplete safetensors file: tensor ")
    first.write_bytes(data[:100])
    assert reason() == f"{first}: incomplete safetensors file: its header is cut off"
    first.write_bytes(b"\x02" + bytes(7) + b"[]")
    assert reason().startswith(f"{first}: its header cannot be read: ")
    write_file(first, [("lm_head.weight", "BF16", (64, 64))])
    assert "of model.safetensors.index.json is missing" in reason()
    write_file(first, [("model.norm.weight", "BF16", (64,))])
    assert "tensor model.norm.weight is also in model-00001-of-00003.safetensors" in reason()
    broken = json.dumps({"a": {"dtype": "BF16", "shape": [3], "data_offsets": [0, 5]}}).encode()
    first.write_bytes(len(broken).to_bytes(8, "little") + broken)
    assert reason() == f"{first}: tensor a has 5 bytes, its shape requires 6"
    first.unlink()
    assert reason() == f"{first}: No such file or directory"
