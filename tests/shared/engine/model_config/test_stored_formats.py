"""Checkpoints of other tools' formats give the logits of the dequantized ones, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shared.engine.executors.group.load_group import load_group
from shared.engine.executors.group.rank_computer import load_rank
from shared.engine.executors.load import load_executor
from shared.engine.parallel.mesh import Mesh
from shared.engine.parallel.mesh_shape import MeshShape
from shared.errors import CheckpointError
from tests.shared.engine.model_config.test_served_bits import setup
from tests.shared.engine.parallel.rank_threads import run_ranks
from tests.support.engine.checkpoints import write_model
from tests.support.engine.steps import Blocks, advance, prefill, step_of
from tests.support.engine.stored_formats import FORMATS, StoredFormat, awq, fp8, gptq, write_formats
from tests.support.grids import in_short_run

PROMPT = [(11 * n) % 190 for n in range(45)]
# Heads of 24: rows of partial blocks, which no compiled loops decode; all else is full blocks.
MODEL: dict[str, Any] = {
    "architecture": "LlamaForCausalLM",
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "head_dim": 24,
    "dtype": torch.bfloat16,
}
EXPERTS: dict[str, Any] = {
    **MODEL,
    "architecture": "Qwen3MoeForCausalLM",
    "moe_intermediate_size": 96,
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "norm_topk_prob": True,
}
# Each kind of codes and scales compiles its own loops, for 7 s.
SHORT = ("awq", "gptq, desc_act")


def logits(folder: Path, dtype: str = "bfloat16") -> Tensor:
    """Of a prompt in chunks, then of a step of two sequences."""
    executor = load_executor(folder, dtype=dtype, kv_cache_bytes=8 << 20)
    blocks = Blocks(64)
    long, short = blocks.line(PROMPT, room=1), blocks.line(PROMPT[:3])
    found = prefill(executor, long, 33)
    long.token_ids.append(7)
    return torch.cat((found, advance(executor, [(long, 1), (short, 3)])))


def assert_same_logits(folder: Path, dense: Path) -> None:
    assert torch.equal(logits(folder), logits(dense))


@pytest.mark.parametrize("name", in_short_run(SHORT, FORMATS))
def test_logits_are_those_of_the_dequantized_checkpoint(name: str, tmp_path: Path) -> None:
    write_model(tmp_path / "plain", **MODEL)
    assert_same_logits(
        *write_formats(tmp_path / "plain", tmp_path / "stored", lambda _: FORMATS[name])
    )


@pytest.mark.parametrize("name", in_short_run(["awq"], ["awq", "gptq, desc_act", "int8", "gptq"]))
def test_experts_have_the_format_too(name: str, tmp_path: Path) -> None:
    """Attention is dense, by a list of its own."""
    write_model(tmp_path / "plain", **EXPERTS)

    def of_experts(layer: str) -> StoredFormat | None:
        return None if "self_attn" in layer else FORMATS[name]

    fields: dict[str, Any] = {"modules_to_not_convert": ["self_attn"]}
    if "ignore" in FORMATS[name].config:
        fields = {"ignore": ["lm_head", "re:.*self_attn.*"]}
    assert_same_logits(
        *write_formats(tmp_path / "plain", tmp_path / "stored", of_experts, **fields)
    )


@pytest.mark.long  # compiles loops for codes of 8 bits
def test_layers_of_one_checkpoint_may_differ(tmp_path: Path) -> None:
    write_model(tmp_path / "plain", **MODEL)
    eight = gptq(64, num_bits=8)

    def of_layer(layer: str) -> StoredFormat | None:
        if "layers.0" in layer:
            return None
        return eight if layer.endswith("down_proj") else gptq()

    dynamic = {r"-:.*\.layers\.0\..*": {}, r"+:.*down_proj": {"bits": 8, "group_size": 64}}
    folder, dense = write_formats(
        tmp_path / "plain", tmp_path / "stored", of_layer, **{**gptq().config, "dynamic": dynamic}
    )
    assert_same_logits(folder, dense)


RANKED: dict[str, Any] = {
    **MODEL,
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_key_value_heads": 8,
    "head_dim": 32,
}


@pytest.mark.long  # compiles the loops of ranks for each form
@pytest.mark.parametrize("name", ["awq", "gptq, zeros", "int8, groups, zeros", "fp8 per tensor"])
def test_ranks_have_the_bits_of_the_undivided_model(name: str, tmp_path: Path) -> None:
    write_model(tmp_path / "plain", **RANKED)
    stored = tmp_path / "stored"
    folder, _ = write_formats(tmp_path / "plain", stored, lambda _: FORMATS[name])
    executor = load_executor(folder, dtype="bfloat16", kv_cache_bytes=8 << 20)
    line = Blocks(64).line(PROMPT)
    expected = executor.step_logits(step_of([(line, 45)]))

    def of_rank(mesh: Mesh) -> Tensor:
        return load_rank(setup(folder), mesh).computer.step_logits(step_of([(line, 45)]))

    for tp in (2, 4):
        for found in run_ranks(MeshShape(tp), of_rank):
            assert torch.equal(found, expected), f"tp {tp}"


@pytest.mark.parametrize(
    ("form", "message"),
    [
        (awq(128), r"o_proj\.qweight: ranks cut it at column 64, inside of 128 columns"),
        (gptq(is_ordered=True), r"ranks cut its columns, which have an order \(desc_act, actorder"),
    ],
    ids=["group", "order"],
)
def test_cuts_that_no_format_allows(form: StoredFormat, message: str, tmp_path: Path) -> None:
    write_model(tmp_path / "plain", **RANKED)
    folder, _ = write_formats(tmp_path / "plain", tmp_path / "stored", lambda _: form)
    with pytest.raises(CheckpointError, match=message) as error:
        load_group(folder, "cpu", MeshShape(4))
    assert "\n" not in error.value.message
    assert any(each in error.value.message for each in ("use fewer ranks", "use one rank"))


def test_scales_of_activations_are_not_used(tmp_path: Path) -> None:
    write_model(tmp_path / "plain", **MODEL)
    found = [
        write_formats(tmp_path / "plain", tmp_path / str(is_static), lambda _, each=each: each)[0]
        for is_static in (False, True)
        for each in [fp8("fp8", is_per_tensor=True, is_static=is_static)]
    ]
    assert_same_logits(*found)
