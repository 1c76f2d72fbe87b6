"""`hearth plan`: what a model needs on each rank, from its config alone."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from services.cli.service_options import DEMO_MODEL_DIR
from services.local.hub_download import local_copy
from shared.errors import ConfigError

OPERATE = "Operate"
UNITS = {"": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "KB": 10**3, "MB": 10**6}
UNITS |= {"GB": 10**9, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}

app = typer.Typer()


@app.command(
    rich_help_panel=OPERATE,
    epilog="Examples:  hearth plan --model ~/models/llama-70b --tp 4 --memory 80GiB  ·  "
    "hearth plan --model org/name --tp 2 --pp 2 --json",
)
def plan(
    model: Annotated[
        Path, typer.Option(help="Checkpoint directory, or a hub id such as org/name.")
    ] = DEMO_MODEL_DIR,
    tp: Annotated[int, typer.Option(help="Ranks that share each layer: 1, 2, 4 or 8.")] = 1,
    pp: Annotated[int, typer.Option(help="Pipeline stages.")] = 1,
    memory: Annotated[
        str | None, typer.Option(help="Memory of each rank, such as 80GiB (default: not checked).")
    ] = None,
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "bfloat16",
    max_batch_tokens: Annotated[int, typer.Option(min=1, help="Tokens of the largest step.")] = 512,
    max_sequences: Annotated[int, typer.Option(min=1, help="Sequences of a step.")] = 256,
    json: Annotated[bool, typer.Option("--json", help="JSON instead of a table.")] = False,
) -> None:
    """Show the weights and KV of each rank of a model. Loads nothing but config.json."""
    from services.cli.plan.plan_table import show_plan
    from shared.engine.models.checkpoint_config import read_config
    from shared.engine.parallel.planning.memory_plan import StepSize, plan_memory

    if dtype not in ITEM_BYTES:
        raise ConfigError(f"dtype {dtype!r} is none of {', '.join(ITEM_BYTES)}", param="dtype")
    ranks = plan_memory(
        read_config(local_copy(model, needs_weights=False)),
        tp=tp,
        pp=pp,
        item_bytes=ITEM_BYTES[dtype],
        memory_bytes=None if memory is None else parse_bytes(memory),
        step=StepSize(max_batch_tokens=max_batch_tokens, max_sequences=max_sequences),
    )
    show_plan(ranks, is_json=json)


def parse_bytes(text: str) -> int:
    """`80GiB` -> bytes. Raises ConfigError."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-zA-Z]*)", text.strip())
    if found is None or found[2].upper() not in UNITS:
        raise ConfigError(f"memory {text!r} is not a size such as 80GiB or 24GB", param="memory")
    return int(float(found[1]) * UNITS[found[2].upper()])
