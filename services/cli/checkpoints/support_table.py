"""Which formats of weights each architecture takes, computed from what its config makes of it.

Most formats take every linear layer. A rotary projection whose pairs are neighbours (DeepSeek,
Llama 4) is put in another order of rows as it is read, which words of several rows do not allow.
Tools quantize the experts of Llama 4 as one linear layer each; those of gpt-oss, which are one
tensor a layer, are in MXFP4 alone, and MXFP4 is of these alone.
"""

from __future__ import annotations

from typing import Any

from rich.table import Table

from shared.engine.model_config.checkpoint_form import FIXED_KINDS
from shared.engine.model_config.formats import (
    Awq,
    Fp8Block,
    Fp8Rows,
    Gptq,
    Int4,
    Int8,
    Mxfp4,
    Packed,
    WeightFormat,
    units_of,
)
from shared.engine.model_config.model_config import ModelConfig
from shared.engine.models import FAMILIES
from shared.errors import CheckpointError

FORMATS: dict[str, WeightFormat] = {
    "INT4": Int4(group=32, is_symmetric=True),
    "INT4, zeros": Int4(group=32, is_symmetric=False),
    "INT8 packed": Packed(num_bits=8, group=32, is_symmetric=True),
    "INT8": Int8(group=0, is_symmetric=True),
    "FP8 blocks": Fp8Block(),
    "FP8": Fp8Rows(is_per_tensor=False),
    "AWQ": Awq(group=32),
    "GPTQ": Gptq(num_bits=4, group=32, is_symmetric=True, is_offset=True),
    "MXFP4": Mxfp4(),
}
ROTARY, EXPERTS = "rotary projections", "stacked experts"
# The smallest config of which each family reads what it knows.
_SHAPE = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 64}
_HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32}
_EXPERTS = {"num_experts_per_tok": 1, "moe_intermediate_size": 32} | dict.fromkeys(
    ("num_experts", "num_local_experts", "n_routed_experts"), 8
)
_LATENTS = dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 32)
_TEXT = {**_SHAPE, **_HEADS, **_EXPERTS, **_LATENTS, "n_group": 1, "topk_group": 1}
_TOKENS = {"image_token_id": 0}
_IMAGES = {"image_size": 64, "patch_size": 16, "hidden_size": 32, "num_attention_heads": 2}


def smallest_config(architecture: str) -> ModelConfig:
    """Raises CheckpointError if the family needs fields that no config here has."""
    given: dict[str, Any] = {**_TEXT, **_TOKENS, "architectures": [architecture]}
    given["text_config"] = dict(_TEXT)
    try:
        return FAMILIES[architecture](given)
    except CheckpointError:  # an encoder of images has to be described
        return FAMILIES[architecture]({**given, "vision_config": dict(_IMAGES)})


def dense_parts(config: ModelConfig, form: WeightFormat) -> list[str]:
    """Returns the parts of a model that must be dense beside weights of this format, which is not
    MXFP4.
    """
    found = []
    if config.checkpoint.paired and not units_of(form).keys().isdisjoint(FIXED_KINDS):
        found.append(ROTARY)
    if config.checkpoint.has_mxfp4:
        found.append(EXPERTS)
    return found


def support_rows() -> list[tuple[str, ...]]:
    """Returns the architecture and a cell for each format: "all", what must be dense, or "no"."""
    rows = []
    for architecture in sorted(FAMILIES):
        config = smallest_config(architecture)
        rows.append((architecture, *(_cell(config, form) for form in FORMATS.values())))
    return rows


def _cell(config: ModelConfig, form: WeightFormat) -> str:
    if isinstance(form, Mxfp4):
        return "experts alone" if config.checkpoint.has_mxfp4 else "no"
    dense = dense_parts(config, form)
    return f"without {' and '.join(dense)}" if dense else "all"


def support_table() -> Table:
    table = Table("architecture", *FORMATS, box=None, header_style="bold", pad_edge=False)
    for row in support_rows():
        table.add_row(*row)
    return table
