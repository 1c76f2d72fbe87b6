"""Lists of layers in the shapes of published `quantization_config`s, with the names of the
checkpoints that have them: which layers are quantized, and the logits of small random files.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from services.cli.checkpoints.support_table import smallest_config
from shared.engine.model_config.checkpoint_form import model_names, own_names
from shared.engine.model_config.quantization_config import checkpoint_formats
from shared.engine.models import FAMILIES as ARCHITECTURES
from shared.engine.models.checkpoint_config import with_formats
from shared.engine.planning.model_tensors import model_tensors
from tests.shared.engine.model_config.test_stored_formats import assert_same_logits
from tests.support.engine.families import FAMILIES, one_tensor_each
from tests.support.engine.quantized import edit_tensors
from tests.support.engine.stored_formats import (
    StoredFormat,
    awq,
    fp8,
    gptq,
    int8,
    packed,
    write_formats,
)
from tests.support.grids import in_one_test

ATTENTION = tuple(f"self_attn.{each}_proj" for each in "qkvo")
MLP = tuple(f"{each}_proj" for each in ("gate", "up", "down"))
LATENTS = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")


def under(place: str, names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f"{place}.{each}" for each in names)


class Names(NamedTuple):
    """How a checkpoint of an architecture calls the linear layers of decoder layer 1."""

    architecture: str
    prefix: str
    layers: tuple[str, ...]

    def full(self) -> list[str]:
        return [f"{self.prefix}layers.1.{each}" for each in self.layers]


MIXTRAL = ("w1", "w2", "w3")
EXPERTS = (*ATTENTION, *under("mlp.experts.0", MLP))
NAMES = {
    "llama, yarn": Names("LlamaForCausalLM", "model.", (*ATTENTION, *under("mlp", MLP))),
    "llama4, text of a multimodal one": Names(
        "Llama4ForConditionalGeneration",
        "language_model.model.",
        (
            *ATTENTION,
            *under("feed_forward", MLP),
            *under("feed_forward.shared_expert", MLP),
            *under("feed_forward.experts.0", MLP),
        ),
    ),
    "gemma3, text of a multimodal one": Names(
        "Gemma3ForConditionalGeneration",
        "language_model.model.",
        (*ATTENTION, *under("mlp", MLP)),
    ),
    "idefics3": Names(
        "Idefics3ForConditionalGeneration", "model.text_model.", (*ATTENTION, *under("mlp", MLP))
    ),
    "mixtral": Names(
        "MixtralForCausalLM",
        "model.",
        (*ATTENTION, *under("block_sparse_moe.experts.0", MIXTRAL)),
    ),
    "qwen3 moe": Names("Qwen3MoeForCausalLM", "model.", EXPERTS),
    "glm4 moe": Names(
        "Glm4MoeForCausalLM", "model.", (*EXPERTS, *under("mlp.shared_experts", MLP))
    ),
    "kimi, text": Names(
        "KimiK25ForConditionalGeneration",
        "language_model.model.",
        (*under("self_attn", LATENTS), *EXPERTS[4:], *under("mlp.shared_experts", MLP)),
    ),
    "gpt-oss": Names("GptOssForCausalLM", "model.", EXPERTS),
}


class Case(NamedTuple):
    """`config`: fields of quantization_config; `dense`: an expression that finds the names of the
    layers that the file has dense.
    """

    family: str
    form: StoredFormat | None  # None: MXFP4 of experts
    config: Mapping[str, Any]
    dense: str


INT4 = packed(0, num_bits=4)
SCOUT, GEMMA = "llama4, text of a multimodal one", "gemma3, text of a multimodal one"
RECIPE = ["re:.*lm_head", "re:.*self_attn", "re:.*router", "re:.*vision_model.*"]
RECIPE += ["re:.*multi_modal_projector.*", "Llama4TextAttention"]
BESIDE = "vision|projector|connector"


def listed(prefix: str, layers: tuple[str, ...]) -> list[str]:
    """Each layer by its full name, as compressed-tensors writes what a recipe has left out."""
    return [f"{prefix}layers.{index}.{each}" for index in range(4) for each in layers]


FULL = [*ATTENTION, "feed_forward.router"]
CASES = {
    "Llama 4 Scout w4a16, a recipe": Case(
        SCOUT, INT4, {"ignore": RECIPE}, f"self_attn|router|{BESIDE}"
    ),
    "Llama 4 Scout w4a16, names": Case(
        SCOUT,
        INT4,
        {"ignore": ["language_model.lm_head", *listed("language_model.model.", (*FULL,))]},
        f"self_attn|router|{BESIDE}",
    ),
    "Llama 4 Scout w4a16, names of another release": Case(
        SCOUT,
        INT4,
        {
            "ignore": [
                "model.vision_model.model.layers.0.mlp.fc1",
                "lm_head",
                *listed(
                    "model.language_model.", (*FULL, *under("feed_forward.shared_expert", MLP))
                ),
            ]
        },
        f"self_attn|router|shared_expert|{BESIDE}",
    ),
    "Llama 4 Scout FP8, experts alone": Case(
        SCOUT,
        fp8(),
        {
            "ignore": [
                *RECIPE[:-1],
                "re:.*shared_expert",
                *(f"re:.*feed_forward.{each}" for each in MLP),
            ]
        },
        rf"self_attn|router|shared_expert|feed_forward\.\w+_proj|{BESIDE}",
    ),
    "Gemma 3 w4a16": Case(
        GEMMA,
        INT4,
        {"ignore": ["re:.*lm_head", "re:vision_tower.*", "re:multi_modal_projector.*"]},
        BESIDE,
    ),
    "Gemma 3 FP8, names of another release": Case(
        GEMMA,
        fp8(),
        {"ignore": ["lm_head", *listed("model.language_model.", ATTENTION)]},
        f"self_attn|{BESIDE}",
    ),
    "Gemma 3 AWQ": Case(
        GEMMA, awq(0), {"modules_to_not_convert": ["vision_tower", "multi_modal_projector"]}, BESIDE
    ),
    "Idefics 3 FP8": Case(
        "idefics3",
        fp8("fp8", is_per_tensor=True),
        {
            "modules_to_not_convert": [
                *("model.vision_model", "model.connector", "lm_head"),
                *listed("model.text_model.", ATTENTION),
            ]
        },
        f"self_attn|{BESIDE}",
    ),
    "Mixtral w4a16": Case(
        "mixtral", INT4, {"ignore": ["lm_head", "re:.*block_sparse_moe.gate"]}, r"moe\.gate$"
    ),
    "Mixtral AWQ": Case("mixtral", awq(0), {"modules_to_not_convert": ["gate"]}, r"moe\.gate$"),
    "Mixtral INT8, groups": Case(
        "mixtral",
        int8(),
        {
            "config_groups": {
                "group_0": {**int8().config["config_groups"]["group_0"], "targets": ["Linear"]},
                "group_1": {
                    "targets": [r"re:.*experts.*\.w2$"],
                    "weights": {"num_bits": 8, "symmetric": True, "strategy": "channel"},
                },
            },
            "ignore": ["lm_head", "re:.*gate.*", "re:.*self_attn.*"],
        },
        r"moe\.gate$|self_attn",
    ),
    "Qwen 3 30B-A3B FP8": Case(
        "qwen3 moe",
        fp8("fp8", is_per_tensor=True),
        {
            "modules_to_not_convert": [
                "lm_head",
                *listed("model.", ("input_layernorm", "mlp.gate", "post_attention_layernorm")),
            ]
        },
        r"mlp\.gate$",
    ),
    "Qwen 3 GPTQ, dynamic": Case(
        "qwen3 moe",
        gptq(0),
        {
            "dynamic": {
                "lm_head": {},
                "model.language_model.embed_tokens": {},
                "-:.*attn.*": {},
                "-:.*shared_expert.*": {},
                "-:.*visual.*": {},
            }
        },
        r"self_attn|mlp\.gate$",
    ),
    "GPTQ, the first that matches": Case(
        "llama, yarn",
        gptq(0),
        {"dynamic": {r"+:.*\.1\.mlp\..*": {"bits": 4}, r"-:.*": {}}},
        r"self_attn|layers\.[02]\.",
    ),
    "GLM 4.6, router alone": Case(
        "glm4 moe", INT4, {"ignore": ["re:.*gate$", "lm_head", "model.embed_tokens"]}, r"\.gate$"
    ),
    "Kimi K2.5": Case(
        "kimi, text",
        INT4,
        {
            "ignore": [
                *("lm_head", "re:.*self_attn.*", "re:.*shared_experts.*"),
                r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
            ]
        },
        rf"self_attn|shared_experts|mlp\.\w+_proj|{BESIDE}",
    ),
    "Llama 3.1 405B FP8": Case(
        "llama, yarn",
        fp8("fbgemm_fp8"),
        {
            "modules_to_not_convert": [
                "lm_head.weight",
                "model.layers.0",
                *listed("model.", ATTENTION),
            ]
        },
        r"self_attn|layers\.0\.",
    ),
    "fused names": Case(
        "llama, yarn",
        INT4,
        {"ignore": ["lm_head", *listed("model.", ("self_attn.qkv_proj", "mlp.gate_up_proj"))]},
        r"[qkv]_proj$|gate_proj|up_proj",
    ),
    "fused parts": Case(
        "llama, yarn",
        awq(0),
        {"modules_to_not_convert": ["qkv_proj", "model.layers.*.mlp"]},
        r"[qkv]_proj$|mlp\.",
    ),
    "a class": Case(
        "llama, yarn",
        INT4,
        {
            "config_groups": {
                "group_0": INT4.config["config_groups"]["group_0"],
                "group_1": {
                    "targets": ["re:.*down_proj"],
                    "weights": {"num_bits": 4, "symmetric": True, "strategy": "channel"},
                },
            },
            "ignore": ["lm_head", "LlamaAttention"],
        },
        r"^$",
    ),
    "gpt-oss": Case(
        "gpt-oss",
        None,
        {
            "quant_method": "mxfp4",
            "modules_to_not_convert": [
                *("model.layers.*.self_attn", "model.layers.*.mlp.router"),
                *("model.embed_tokens", "lm_head"),
            ],
        },
        "self_attn|router",
    ),
}


@in_one_test("name", CASES)
def test_layers_of_the_file_are_quantized(name: str) -> None:
    family, form, fields, dense = CASES[name]
    names = NAMES[family]
    config = smallest_config(names.architecture)
    base = {} if form is None else form.config
    written = checkpoint_formats({"quantization_config": {**base, **fields}}).weights
    formats = with_formats(config, written).layers[0].formats
    assert formats is not None
    weights = [f"{each}.weight" for each in names.full()]
    for own, layer in model_names(weights, config.checkpoint):
        is_dense = re.search(dense, own.removesuffix(".weight")) is not None
        found = formats.quantization.format_of(layer.removesuffix(".weight"))
        assert (found is None) == is_dense, own


def test_names_of_every_family_are_found_again() -> None:
    """The names that a checkpoint may have for a layer become the model's as it is loaded."""
    for architecture in ARCHITECTURES:
        config = smallest_config(architecture)
        layers = {
            name.removesuffix(".weight")
            for name in model_tensors(config)
            if name.startswith("model.layers.") and name.endswith(".weight")
        }
        for layer in sorted(layers):
            own = [f"{each}.weight" for each in own_names(layer, config.checkpoint.renames)]
            found = {name for _, name in model_names(own, config.checkpoint)}
            assert f"{layer}.weight" in found
    for family, names in NAMES.items():
        config = smallest_config(names.architecture)
        for own, name in model_names(names.full(), config.checkpoint):
            assert own in own_names(name, config.checkpoint.renames), family


def write_case(case: Case, folder: Path) -> tuple[Path, Path]:
    """Returns the checkpoint, and the dense one of the same numbers."""
    plain, stored = folder / "plain", folder / "stored"
    FAMILIES[case.family].write(plain, dtype=torch.bfloat16)
    form = case.form
    assert form is not None
    edit_tensors(plain, one_tensor_each)

    def form_of(layer: str) -> StoredFormat | None:
        return None if re.search(case.dense, layer) else form

    return write_formats(plain, stored, form_of, **{**form.config, **case.config})


STORED = [name for name, case in CASES.items() if case.form is not None]


@pytest.mark.long
@pytest.mark.parametrize("name", STORED)
def test_logits_are_those_of_the_dequantized_file(name: str, tmp_path: Path) -> None:
    assert_same_logits(*write_case(CASES[name], tmp_path))
