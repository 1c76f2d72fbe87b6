"""`quantization_config`: what is read, and one line for everything that is refused."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shared.engine.model_config.formats import (
    Awq,
    Fp8Block,
    Gptq,
    Int4,
    Mxfp4,
    num_stored_bytes,
)
from shared.engine.model_config.quantization import Quantization
from shared.engine.model_config.quantization_config import checkpoint_formats
from shared.engine.models.checkpoint_config import read_config, with_formats
from shared.engine.models.llama import configure
from shared.errors import CheckpointError
from tests.support.engine.checkpoints import write_llama
from tests.support.engine.quantized import edit_config, packed_config

PACKED = {**packed_config(actorder=None), "kv_cache_scheme": None}
PACKED["config_groups"]["group_0"]["input_activations"] = None
FP8: dict[str, Any] = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}
# Kimi K2.5: attention, shared experts and the dense layer are not quantized.
KIMI_IGNORED = [
    "lm_head",
    "re:.*self_attn.*",
    "re:.*shared_experts.*",
    r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
]


SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}


def weights_of(written: dict[str, Any]) -> Quantization | None:
    return checkpoint_formats(written).weights


def given(changes: dict[str, Any], base: dict[str, Any] = PACKED) -> dict[str, Any]:
    """`changes`: dotted paths -> values."""
    written = copy.deepcopy(base)
    for path, value in changes.items():
        *parents, last = path.split(".")
        place = written
        for parent in parents:
            place = place[parent]
        place[last] = value
    return {"quantization_config": written, "dtype": "bfloat16"}


FIELDS = {
    "vocab_size": 50,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
WEIGHTS = "config_groups.group_0.weights"
BLOCK: dict[str, Any] = {
    "num_bits": 8,
    "type": "float",
    "strategy": "block",
    "block_structure": [128, 128],
}
UNEVEN: dict[str, Any] = {"strategy": "channel", "symmetric": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True}


def test_a_dense_checkpoint_has_none() -> None:
    assert weights_of({"dtype": "bfloat16"}) is None


def test_groups_and_rows_of_int4() -> None:
    found = weights_of(given({}))
    assert found is not None
    name = "model.layers.0.mlp.up_proj"
    assert found.format_of(name) == Int4(group=32, is_symmetric=True, scale_dtype="BF16")
    assert found.format_of("lm_head") is None
    changes = {f"{WEIGHTS}.strategy": "channel", f"{WEIGHTS}.group_size": None}
    found = weights_of(given({**changes, f"{WEIGHTS}.symmetric": False}))
    assert found is not None
    assert found.format_of(name) == Int4(group=0, is_symmetric=False, scale_dtype="BF16")


def test_scales_have_the_models_dtype() -> None:
    for dtype, expected in (("float16", "F32"), ("bfloat16", "BF16"), (None, "F32")):
        found = weights_of({**given({}), "dtype": dtype})
        assert found is not None
        form = found.format_of("model.layers.0.mlp.up_proj")
        assert isinstance(form, Int4)
        assert form.scale_dtype == expected


def test_ignored_layers_of_kimi() -> None:
    """The layers' names are those of a language model beside an image encoder."""
    outer = given({"ignore": KIMI_IGNORED})
    found = weights_of({**outer, "text_config": outer, "architectures": ["KimiK25"]})
    assert found is not None
    dense = (
        "lm_head",
        "model.layers.3.self_attn.q_a_proj",
        "model.layers.3.mlp.shared_experts.up_proj",
        "model.layers.0.mlp.gate_proj",
    )
    assert [found.format_of(name) for name in dense] == [None] * 4
    assert found.format_of("model.layers.3.mlp.experts.17.down_proj") is not None
    assert "'re:.*self_attn.*'" in found.reason("model.layers.3.self_attn.q_a_proj")


def test_names_of_fp8_that_are_not_converted() -> None:
    for field in ("modules_to_not_convert", "ignored_layers"):
        found = weights_of(given({field: ["mlp.gate", "model.layers.1.mlp.up_proj"]}, FP8))
        assert found is not None
        assert found.format_of("model.layers.1.mlp.gate_proj") == Fp8Block()
        for name in ("model.layers.1.mlp.gate", "model.layers.1.mlp.up_proj", "lm_head"):
            assert found.format_of(name) is None


def test_blocks_of_compressed_tensors() -> None:
    """As recipes name them, with activations in groups of the same 128 columns."""
    activations = {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 128}
    group = {"targets": ["Linear"], "weights": BLOCK, "input_activations": activations}
    changes = {"format": "float-quantized", "config_groups.group_0": group}
    found = weights_of(given(changes))
    assert found is not None
    assert found.format_of("model.layers.1.mlp.up_proj") == Fp8Block(scale="weight_scale")


def test_layers_have_formats() -> None:
    ignored = given({"ignore": [r"re:.*layers\.0\..*"]})
    config = with_formats(configure(FIELDS), weights_of(ignored))
    first, second = (layer.formats for layer in config.layers)
    assert first is not None
    assert second is not None
    assert config.is_quantized
    assert first.of("mlp.up_proj") is None
    assert second.of("mlp.up_proj") is not None


def test_mxfp4_is_of_experts() -> None:
    """With the names of gpt-oss's published config."""
    kept = [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ]
    for given in ({}, {"modules_to_not_convert": kept}):
        config = {"quantization_config": {"quant_method": "mxfp4", **given}}
        found = checkpoint_formats(config).weights
        assert found is not None
        assert found.format_of("model.layers.3.mlp.experts.17.down_proj") == Mxfp4()
        for dense in ("self_attn.q_proj", "mlp.router", "mlp.gate", "mlp.down_proj"):
            assert found.format_of(f"model.layers.3.{dense}") is None
    assert num_stored_bytes(Mxfp4(), 64, 96) == 64 * 96 * 17 // 32
    with pytest.raises(CheckpointError, match="mxfp4 is not supported but for the experts of gpt-"):
        with_formats(configure(FIELDS), found)
    with pytest.raises(
        CheckpointError, match="rows of 48 columns are no multiple of group_size 32"
    ):
        num_stored_bytes(Mxfp4(), 8, 48)


def test_bytes_of_formats() -> None:
    assert num_stored_bytes(Int4(group=32, is_symmetric=True), 64, 128) == 64 * 128 * 9 // 16
    assert num_stored_bytes(Fp8Block(), 130, 128) == 130 * 128 + 2 * 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quant_method": "bitsandbytes"}, "quant_method 'bitsandbytes' is not supported"),
        ({"quant_method": "gguf"}, "quant_method 'gguf' is not supported"),
        ({"quant_method": "modelopt"}, "quant_method 'modelopt' is not supported"),
        ({"format": "nvfp4-pack-quantized"}, "format 'nvfp4-pack-quantized' of compressed"),
        ({"format": "float-quantized"}, "int of num_bits 4 is not supported as float-quantized"),
        ({"format": "marlin-24"}, "format 'marlin-24' of compressed-tensors is not supported"),
        ({"config_groups.group_0.format": "int-quantized"}, "num_bits 4 is not supported as int-q"),
        ({f"{WEIGHTS}.num_bits": 2}, "group_0: int of num_bits 2 is not supported as pack-q"),
        ({f"{WEIGHTS}.num_bits": 3}, "group_0: int of num_bits 3 is not supported as pack-q"),
        ({f"{WEIGHTS}.type": "float"}, "group_0: float of num_bits 4 is not supported as pack-q"),
        ({f"{WEIGHTS}.strategy": "tensor"}, "strategy 'tensor' of pack-quantized is not supported"),
        (
            {"format": "float-quantized", f"{WEIGHTS}": BLOCK | {"block_structure": [64, 128]}},
            "group_0: block_structure [64, 128] is not supported",
        ),
        (
            {"format": "float-quantized", f"{WEIGHTS}": {**BLOCK, "block_structure": None}},
            "group_0: block_structure None is not supported",
        ),
        (
            {"format": "float-quantized", f"{WEIGHTS}": {"num_bits": 8, "type": "float"} | UNEVEN},
            "group_0: asymmetric float-quantized is not supported",
        ),
        ({f"{WEIGHTS}.group_size": 0}, "group_0: group_size 0 is not positive"),
        ({f"{WEIGHTS}.actorder": "random"}, "actorder 'random' is not supported"),
        ({f"{WEIGHTS}.num_bits": "four"}, "Expected `int`, got `str`"),
        ({"config_groups": {}}, "config_groups is empty"),
        ({"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme of num_bits 8, type 'int' is not"),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config of compressed"),
        ({"transform_config": {"config_groups": {"a": {}}}}, "transform_config of compressed"),
        ({"ignore": ["re:("]}, "'re:(' is no pattern"),
        (
            {"config_groups.group_0.input_activations": {"num_bits": 8}},
            "quantized activations (group_0) are not supported",
        ),
    ],
)
def test_other_formats_are_refused_by_name(changes: dict[str, Any], message: str) -> None:
    assert_refused(given(changes), message)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weight_block_size": [64, 64]}, "fp8 with weight_block_size [64, 64]"),
        ({"activation_scheme": "odd"}, "fp8 with activation_scheme 'odd'"),
        ({"fmt": "e5m2"}, "fp8 with fmt 'e5m2'"),
        ({"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme of num_bits 8, type 'int' is not"),
    ],
)
def test_other_fp8_is_refused(changes: dict[str, Any], message: str) -> None:
    assert_refused(given(changes, FP8), message)


@pytest.mark.parametrize(
    ("base", "changes", "message"),
    [
        (AWQ, {"bits": 8}, "awq of bits 8 is not supported"),
        (AWQ, {"version": "gemv"}, "awq of version 'gemv' is not supported"),
        (AWQ, {"zero_point": False}, "awq without zero_point is not supported"),
        (AWQ, {"group_size": 0}, "awq: group_size 0 is neither positive nor -1"),
        (GPTQ, {"bits": 2}, "gptq of bits 2 is not supported"),
        (GPTQ, {"bits": 3}, "gptq of bits 3 is not supported"),
        (GPTQ, {"checkpoint_format": "marlin"}, "gptq of checkpoint_format 'marlin' is not"),
        (GPTQ, {"is_marlin_format": True}, "gptq of checkpoint_format 'marlin' is not"),
        (GPTQ, {"lm_head": True}, "gptq with a quantized lm_head is not supported"),
        (GPTQ, {"pack_dtype": "int64"}, "gptq of pack_dtype 'int64' is not supported"),
        (GPTQ, {"dynamic": {"+:(": {}}}, "'re:(' is no pattern"),
        (GPTQ, {"dynamic": {"a": {"bits": 3}}}, "gptq of bits 3 is not supported"),
        (GPTQ, {"group_size": "all"}, "Expected `int`, got `str`"),
    ],
)
def test_other_awq_and_gptq_is_refused(
    base: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    assert_refused(given(changes, base), message)


@pytest.mark.parametrize("base", [PACKED, FP8, AWQ, GPTQ])
def test_a_refusal_lists_what_is_served(base: dict[str, Any]) -> None:
    found = given({"quant_method": "hqq"}, base)
    formats = "compressed-tensors (INT4, INT8, FP8), fp8, fbgemm_fp8, awq (gemm), gptq and mxfp4"
    served = f"served are dense checkpoints, {formats}: take one"
    assert_refused(found, f"quant_method 'hqq' is not supported; {served}")


def test_names_of_awq_that_are_not_converted() -> None:
    found = weights_of(given({"modules_to_not_convert": ["gate", "layers.0.", "visual"]}, AWQ))
    assert found is not None
    assert found.format_of("model.layers.1.mlp.gate_proj") == Awq(group=128)
    for name in ("model.layers.1.mlp.gate", "model.layers.0.mlp.up_proj", "lm_head"):
        assert found.format_of(name) is None
    assert weights_of(given({"group_size": -1}, AWQ)) == weights_of(
        {"quantization_config": {"quant_method": "awq", "w_bit": 4, "q_group_size": -1}}
    )


def test_layers_of_gptq_have_their_own_fields() -> None:
    own = {r"+:.*\.up_proj": {"bits": 8, "group_size": 32}, r"-:.*layers\.0\.": {}}
    found = weights_of(given({"dynamic": own, "desc_act": True}, GPTQ))
    assert found is not None
    plain = Gptq(num_bits=4, group=128, is_symmetric=True, is_offset=True, is_ordered=True)
    assert found.format_of("model.layers.1.mlp.gate_proj") == plain
    other = msgspec.structs.replace(plain, num_bits=8, group=32)
    assert found.format_of("model.layers.1.mlp.up_proj") == other
    assert found.format_of("model.layers.0.mlp.gate_proj") is None
    assert found.format_of("model.layers.0.mlp.up_proj") == other  # the first pattern that matches
    named = {"modules_in_block_to_quantize": [["self_attn.q_proj"], ["mlp.up_proj"]]}
    found = weights_of(given({**named, "checkpoint_format": "gptq_v2"}, GPTQ))
    assert found is not None
    assert found.format_of("model.layers.0.mlp.down_proj") is None
    v2 = msgspec.structs.replace(plain, is_offset=False, is_ordered=False)
    assert found.format_of("model.layers.0.mlp.up_proj") == v2


@pytest.mark.parametrize("base", [PACKED, FP8])
def test_a_cache_in_fp8_may_stand_beside_any_weights(base: dict[str, Any]) -> None:
    plain = checkpoint_formats(given({}, base))
    assert not plain.has_fp8_kv
    for strategy in ("tensor", "attn_head"):
        scheme = {**SCHEME, "strategy": strategy, "observer": "minmax"}
        found = checkpoint_formats(given({"kv_cache_scheme": scheme}, base))
        assert found == plain._replace(has_fp8_kv=True)


@pytest.mark.parametrize(
    "written",
    [
        {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": SCHEME},
        {"quant_method": "modelopt", "quant_algo": None, "kv_cache_quant_algo": "FP8"},
        {"quant_method": "modelopt", "kv_cache_scheme": SCHEME},
        {"quant_method": "modelopt", "quantization": {"kv_cache_quant_algo": "FP8"}},
    ],
)
def test_only_the_cache_may_be_in_fp8(written: dict[str, Any], tmp_path: Path) -> None:
    assert checkpoint_formats({"quantization_config": written}) == (None, True)
    write_llama(tmp_path)
    edit_config(tmp_path, lambda config: config.update(quantization_config=written))
    config = read_config(tmp_path)
    assert config.declares_fp8_kv
    assert not config.is_quantized


def test_cache_in_fp8_may_be_declared_in_the_file_of_an_export(tmp_path: Path) -> None:
    write_llama(tmp_path)
    plain, path = read_config(tmp_path), tmp_path / "hf_quant_config.json"
    sections = {"producer": {"name": "modelopt"}, "quantization": {"kv_cache_quant_algo": "FP8"}}
    path.write_text(json.dumps(sections))
    assert read_config(tmp_path) == msgspec.structs.replace(plain, declares_fp8_kv=True)
    sections["quantization"]["quant_algo"] = "NVFP4"
    path.write_text(json.dumps(sections))
    with pytest.raises(CheckpointError, match=r"hf_quant_config\.json: .* 'NVFP4' of modelopt"):
        read_config(tmp_path)
    path.write_text("[]")
    with pytest.raises(CheckpointError, match=r"hf_quant_config\.json: Expected `object`"):
        read_config(tmp_path)


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "quant_algo 'FP8' of modelopt is not"),
        ({"quant_method": "modelopt", "kv_cache_quant_algo": "NVFP4"}, "'NVFP4' of modelopt is"),
        ({"quant_method": "modelopt", "quantization": ["FP8"]}, "Expected `object | null`"),
        ({"quant_method": "quark", "kv_cache_quant_config": {}}, "quant_method 'quark' is not"),
        *(
            ({**PACKED, "kv_cache_scheme": {**SCHEME, **changes}}, message)
            for changes, message in (
                ({"type": "int"}, "kv_cache_scheme of num_bits 8, type 'int'"),
                ({"num_bits": 4}, "kv_cache_scheme of num_bits 4, type 'float'"),
                ({"dynamic": True}, "dynamic True is not supported"),
                ({"strategy": "group"}, "strategy 'group', dynamic False is not supported"),
                ({"symmetric": False}, "symmetric False is not supported"),
                ({"num_bits": "8"}, "Expected `int`, got `str`"),
            )
        ),
    ],
)
def test_other_caches_are_refused(written: dict[str, Any], message: str) -> None:
    assert_refused({"quantization_config": written}, message)


def test_two_configs_must_agree() -> None:
    inner = given({f"{WEIGHTS}.group_size": 64})
    message = (
        "quantization_config and text_config.quantization_config disagree: config_groups: group_0: "
        "weights: group_size is 32 and 64"
    )
    assert_refused({**given({}), "text_config": inner}, message)
    only_inner = {"text_config": inner}
    found = weights_of(only_inner)
    assert found is not None
    form = found.format_of("model.layers.0.mlp.up_proj")
    assert form == Int4(group=64, is_symmetric=True, scale_dtype="BF16")


def test_what_is_no_object() -> None:
    assert_refused({"quantization_config": "int4"}, "quantization_config 'int4' is not an object")


def assert_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError) as error:
        checkpoint_formats(config)
    assert message in error.value.message
    assert "\n" not in error.value.message
    assert error.value.message.startswith("quantization_config")
