"""`hearth plan`: what a model needs on each rank, and on links, from its config alone."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from services.cli.cluster.service_options import DEMO_MODEL_DIR, local_model
from services.cli.options import OPERATE, size_option
from services.cli.output import show
from shared.config import default_block_size, expert_split
from shared.errors import ConfigError
from shared.numerics import exchange_of

if TYPE_CHECKING:
    from services.cli.checkpoints.links_table import LinksPlan
    from shared.engine.model_config.model_config import ModelConfig

LINKS_HELP = (
    "Hosts, their ranks and the links between them, JSON or TOML: "
    '{"hosts": [{"name": "a", "num_ranks": 4}, {"name": "b", "num_ranks": 4}], "links": '
    '[{"hosts": ["a", "b"], "link": {"latency_s": 0.01, "bytes_per_s": 125e6}}]}. '
    "Shows what ranks send each other, for the chosen plan and all others, and how the KV of "
    'a prompt of --context tokens is pushed from one worker to another; with "device": "cuda" '
    "a host has it on GPUs."
)
DEFAULT_CONTEXT_TOKENS = 32_768
ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}

app = typer.Typer()


@app.command(rich_help_panel=OPERATE)
def models(
    supported: Annotated[
        bool, typer.Option("--supported", help="Quantized weights that each architecture takes.")
    ] = False,
) -> None:
    """List the architectures that are served, by their names in config.json."""
    from services.cli.checkpoints.architecture_table import FORMATS, architecture_table
    from services.cli.checkpoints.support_table import support_table

    show(support_table() if supported else architecture_table(), FORMATS)


@app.command(
    rich_help_panel=OPERATE,
    epilog="Examples:  hearth plan --model ~/models/llama-70b --tp 4 --memory 80GiB  ·  "
    "hearth plan --model org/name --tp 2 --pp 2 --json  ·  hearth plan --links links.json",
)
def plan(
    model: Annotated[
        Path, typer.Option(help="Checkpoint directory, or a hub id such as org/name.")
    ] = DEMO_MODEL_DIR,
    tp: Annotated[
        int | None,
        typer.Option(
            help="Ranks that share each layer: 1, 2, 4 or 8 (default: 1; with --links, chosen)."
        ),
    ] = None,
    pp: Annotated[
        int | None, typer.Option(help="Pipeline stages (default: 1; with --links, chosen).")
    ] = None,
    links: Annotated[Path | None, typer.Option(metavar="FILE", help=LINKS_HELP)] = None,
    batch: Annotated[
        int, typer.Option(min=1, help="With --links: sequences of the step that is planned.")
    ] = 1,
    activations: Annotated[
        str, typer.Option(help="With --links: plain, or bf16-exchange (half the bytes of sums).")
    ] = "plain",
    experts: Annotated[
        str,
        typer.Option(help="ep: a rank holds whole experts; tp: columns of all; auto."),
    ] = "auto",
    memory: Annotated[
        int | None, size_option(help="Memory of each rank, such as 80GiB (default: not checked).")
    ] = None,
    kv_memory: Annotated[
        int | None,
        size_option(help="Of it for KV, such as 28GiB (default: 90% of what the rest leaves)."),
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Tokens of the sequences that are counted, at most the model's context "
            "(default: 32768, or that).",
        ),
    ] = None,
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "bfloat16",
    kv_dtype: Annotated[
        str, typer.Option(help="Of stored KV: auto (fp8 if the checkpoint declares it), bf16, fp8.")
    ] = "auto",
    block_size: Annotated[
        int, typer.Option(min=1, help="Tokens in a KV block: 64 on CUDA, 16 on the CPU.")
    ] = default_block_size("cuda"),
    max_batch_tokens: Annotated[int, typer.Option(min=1, help="Tokens of the largest step.")] = 512,
    max_sequences: Annotated[int, typer.Option(min=1, help="Sequences of a step.")] = 256,
    json: Annotated[bool, typer.Option("--json", help="JSON instead of a table.")] = False,
) -> None:
    """Show the weights and KV of each rank of a model, and with --links what ranks on several hosts
    send each other. Reads config.json and the headers of safetensors files, whose tensors
    are checked against it.
    """
    from services.cli.checkpoints.plan_table import show_plan
    from shared.engine.checkpoint_check import check_checkpoint
    from shared.engine.planning.kv_plan import kv_item_bytes
    from shared.engine.planning.memory_plan import (
        MemoryLimit,
        StepSize,
        plan_memory,
        whole_kv_bytes,
    )
    from shared.engine.planning.vision_tensors import encoder_bytes

    if dtype not in ITEM_BYTES:
        raise ConfigError(f"dtype {dtype!r} is none of {', '.join(ITEM_BYTES)}", param="dtype")
    exchange_of(activations)  # also without --links
    model_dir = local_model(model, needs_weights=False)
    config, stored = check_checkpoint(model_dir, needs_weights=False)
    context = min(context or DEFAULT_CONTEXT_TOKENS, config.max_position_embeddings)
    over_links = None
    if links is not None:
        over_links = plan_links(
            config, links, tp=tp, pp=pp, batch=batch, dtype=dtype, activations=activations
        )
        tp, pp = over_links.planned.tp, over_links.planned.pp
    kv_bytes = kv_item_bytes(config, kv_dtype, dtype)
    ranks = plan_memory(
        config,
        tp=1 if tp is None else tp,
        pp=1 if pp is None else pp,
        item_bytes=ITEM_BYTES[dtype],
        kv_item_bytes=kv_bytes,
        block_size=block_size,
        limit=MemoryLimit(memory_bytes=memory, kv_bytes=kv_memory),
        step=StepSize(max_batch_tokens=max_batch_tokens, max_sequences=max_sequences),
        experts=expert_split(experts),
    )
    show_plan(
        ranks,
        over_links,
        stored,
        context=context,
        pushed_bytes=context * whole_kv_bytes(config, kv_bytes),
        encoder_bytes=encoder_bytes(config.vision, ITEM_BYTES[dtype]),
        is_json=json,
    )


def plan_links(
    config: ModelConfig,
    path: Path,
    *,
    tp: int | None,
    pp: int | None,
    batch: int,
    dtype: str,
    activations: str,
) -> LinksPlan:
    """Plans the ranks over links. Raises ConfigError."""
    from services.cli.checkpoints.links_table import LinksPlan
    from shared.engine.parallel.links import read_links
    from shared.engine.planning.model_shape import model_shape
    from shared.engine.planning.parallel_plan import all_plans, choose_plan, plan_of

    try:
        table = read_links(path)
        shape = model_shape(
            config,
            item_bytes=ITEM_BYTES[dtype],
            num_tokens=batch,
            exchange=exchange_of(activations),
            rank_bytes_per_s=table.rank_bytes_per_s,
        )
        plans = all_plans(table, shape)
        chosen = choose_plan(plans)
        if tp is None and pp is None:
            return LinksPlan(plans, chosen, chosen, batch, table)
        tp = max(1, table.num_ranks // (pp or 1)) if tp is None else tp
        pp = max(1, table.num_ranks // tp) if pp is None and tp > 0 else pp
        return LinksPlan(plans, chosen, plan_of(plans, tp, pp or 1), batch, table)
    except ValueError as error:
        raise ConfigError(str(error), param="links") from None
