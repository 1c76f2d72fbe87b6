"""Which formats of weights each architecture takes, computed from what its config makes of it.

Most formats take every linear layer. A rotary projection whose pairs are neighbours (DeepSeek,
Llama 4) is put in another order of rows as it is read, which words of several rows do not allow.
Tools quantize the experts of Llama 4 as one linear layer each; those of gpt-oss, which are one
tensor a layer, are in MXFP4 alone, and MXFP4 is of these alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mode
from typing import Any

from rich.console import Group
from rich.text import Text

from services.cli.output import plain_table
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
    "INT4 with zeros": Int4(group=32, is_symmetric=False),
    "INT8 packed": Packed(num_bits=8, group=32, is_symmetric=True),
    "INT8": Int8(group=0, is_symmetric=True),
    "FP8 blocks": Fp8Block(),
    "FP8": Fp8Rows(is_per_tensor=False),
    "AWQ": Awq(group=32),
    "GPTQ": Gptq(num_bits=4, group=32, is_symmetric=True, is_offset=True),
    "MXFP4": Mxfp4(),
}
NONE = "no"  # layer of the architecture has the format
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
        return "experts alone" if config.checkpoint.has_mxfp4 else NONE
    dense = dense_parts(config, form)
    return f"without {' and '.join(dense)}" if dense else "all"


def support_table() -> Group:
    """Returns a row for each architecture: what most formats have of it, then the other formats."""
    table = plain_table("architecture", "quantized layers")
    table.columns[0].no_wrap = True
    for architecture, *cells in support_rows():
        table.add_row(architecture, _in_words(cells))
    return Group(table, Text(f"\nFormats: {', '.join(FORMATS)}."))


def _in_words(cells: Sequence[str]) -> str:
    usual = mode(cells)
    formats: dict[str, list[str]] = {}
    for name, cell in zip(FORMATS, cells, strict=True):
        if cell != usual:
            formats.setdefault(cell, []).append(name)
    others = (
        f"{cell} {', '.join(names)}" if cell == NONE else f"{cell} in {', '.join(names)}"
        for cell, names in formats.items()
    )
    return "; ".join([usual, *others])
