"""`hearth quality`: what a KV cache in FP8, or quantized weights, change in predictions."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from services.cli.checkpoints.quality_prompts import Prompt, read_prompts, token_ids_of
from services.cli.cluster.service_options import local_model
from services.cli.options import OPERATE

if TYPE_CHECKING:
    from shared.engine.quantize.compare import Summary

COLUMNS = ("what differs", "tokens", "KL mean", "KL p99", "KL max", "same top token")

app = typer.Typer()


class KvChoice(StrEnum):
    FP8 = "fp8"
    BF16 = "bf16"


class LoadFormat(StrEnum):
    AUTO = "auto"
    DUMMY = "dummy"


@app.command(
    rich_help_panel=OPERATE,
    epilog="Examples:  hearth quality ~/models/tiny --prompts prompts.txt  ·  "
    "hearth quality tiny-int4 --against ~/models/tiny --prompts prompts.jsonl --json",
)
def quality(
    model: Annotated[
        Path, typer.Argument(metavar="DIR", help="Checkpoint directory, or a hub id.")
    ],
    prompts: Annotated[
        Path,
        typer.Option(
            metavar="FILE",
            help="One prompt a line, - for standard input; .jsonl: strings, arrays of token ids, "
            'or objects such as {"prompt": "…"}.',
        ),
    ],
    against: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="The checkpoint that DIR is a quantized copy of."),
    ] = None,
    kv_dtype: Annotated[
        KvChoice, typer.Option(help="fp8, or bf16 to judge weights alone.")
    ] = KvChoice.FP8,
    device: Annotated[
        str, typer.Option(envvar="HEARTH_DEVICE", help="auto, cpu, cuda or cuda:N.")
    ] = "auto",
    load_format: Annotated[
        LoadFormat, typer.Option(help="auto, or dummy: seeded weights from config.json alone.")
    ] = LoadFormat.AUTO,
    json: Annotated[bool, typer.Option("--json", help="JSON instead of a table.")] = False,
) -> None:
    """Compare next-token distributions with those of BF16 weights and a BF16 KV cache, at every
    position of the prompts: KL divergence in nats, and how often both prefer the same token.

    The models compared are in memory at once.
    """
    from shared.engine.models.checkpoint_config import read_config
    from shared.engine.quantize.compare import compare, summary
    from shared.engine.quantize.variants import Comparisons
    from shared.telemetry.log import configure_logging

    configure_logging("quality", level="warning")
    found, needs_weights = read_prompts(prompts), load_format is not LoadFormat.DUMMY
    model_dir = local_model(model, needs_weights=needs_weights)
    original = None if against is None else local_model(against, needs_weights=needs_weights)
    comparisons = Comparisons.of(model_dir, original, kv_dtype.value)
    config = read_config(model_dir)
    max_tokens = config.max_position_embeddings
    ids = token_ids_of(found, model_dir, vocab_size=config.vocab_size, max_tokens=max_tokens)
    longest = max(map(len, ids))
    with comparisons.loaded(longest, device=device, load_format=load_format.value) as executors:
        results = compare(executors, [*comparisons.pairs.values()], ids)
    _show(dict(zip(comparisons.pairs, map(summary, results), strict=True)), found, is_json=json)


def _show(summaries: dict[str, Summary], prompts: list[Prompt], *, is_json: bool) -> None:
    from services.cli.output import plain_table, print_json, table_console

    if is_json:
        rows = [_row(what, each, prompts) for what, each in summaries.items()]
        print_json({"prompts": len(prompts), "comparisons": rows})
        return
    table = plain_table(*COLUMNS)
    for what, each in summaries.items():
        figures = (f"{value:.5f}" for value in (each.kl_mean, each.kl_p99, each.kl_max))
        table.add_row(what, f"{each.num_tokens:,}", *figures, f"{each.top1_agreement:.2%}")
    console = table_console()
    console.print(table)
    for what, each in summaries.items():
        worst = prompts[each.worst]
        place = f"line {worst.line}, mean KL {each.worst_kl:.5f}"
        console.print(f"worst prompt, {what}: {place}: {worst.shown}")


def _row(what: str, each: Summary, prompts: list[Prompt]) -> dict[str, Any]:
    worst = prompts[each.worst]
    return {
        "what": what,
        "tokens": each.num_tokens,
        "kl_mean": each.kl_mean,
        "kl_p99": each.kl_p99,
        "kl_max": each.kl_max,
        "top1_agreement": each.top1_agreement,
        "worst": {"line": worst.line, "kl_mean": each.worst_kl, "prompt": worst.shown},
    }
