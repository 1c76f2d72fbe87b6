"""The architectures that are served, as a table."""

from __future__ import annotations

from rich.table import Table

from services.cli.output import plain_table
from shared.engine.models import BY_MODEL_TYPE, FAMILIES

FORMATS = (
    "Weights are safetensors: BF16, FP16, FP32; INT4, INT8 and FP8 of compressed-tensors; FP8 in "
    "blocks of 128, per channel and per tensor; AWQ (gemm); GPTQ of 4 and 8 bits; "
    "MXFP4 (gpt-oss). GGUF, LoRA adapters and bitsandbytes are not served."
)


def architecture_table() -> Table:
    table = plain_table("architecture", "model_type")
    for name in sorted(FAMILIES):
        types = sorted(each for each, family in BY_MODEL_TYPE.items() if family == name)
        table.add_row(name, ", ".join(types))
    return table
