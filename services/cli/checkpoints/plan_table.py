"""The ranks of a plan as a table or JSON."""

from __future__ import annotations

from typing import Any

from services.cli.checkpoints.links_table import LinksPlan, host_pushes, show_links
from services.cli.output import plain_table, print_json, table_console
from shared.engine.planning.memory_plan import (
    RankMemoryPlan,
    num_kv_tokens,
    num_sequences,
    size_text,
)
from shared.engine.planning.stored_weights import StoredWeights


def show_plan(
    ranks: list[RankMemoryPlan],
    links: LinksPlan | None,
    stored: StoredWeights | None,
    *,
    context: int,
    pushed_bytes: int,
    encoder_bytes: int = 0,
    is_json: bool,
) -> None:
    """Shows a plan. `context` is the length in tokens of the sequences that are counted;
    `encoder_bytes` of the weights are those of an image encoder. `pushed_bytes` are the KV of such
    a sequence.
    """
    sequences = num_sequences(ranks, context)
    pushes = [] if links is None else [*host_pushes(links.links, pushed_bytes)]
    if is_json:
        shown: dict[str, Any] = {"ranks": [_row(each) for each in ranks]}
        shown["checkpoint"] = None if stored is None else _files(stored)
        if sequences is not None:
            shown["sequences"] = {"context": context, "count": sequences[0], "plain": sequences[1]}
        if links is not None:
            shown["plans"] = [links.row(each) for each in links.plans]
            shown["pushes"] = [each.row() for each in pushes]
        if encoder_bytes:
            shown["encoder_bytes"] = encoder_bytes
        print_json(shown | {"kv_tokens": num_kv_tokens(ranks)})
        return
    if links is not None:
        show_links(links, pushes)
    headings = ("stage", "rank", "layers", "heads", "KV heads", "weights", "largest step", "KV")
    table = plain_table(*headings, "KV tokens")
    for each in ranks:
        tokens = "" if each.num_kv_tokens is None else f"{each.num_kv_tokens:,}"
        table.add_row(
            *(str(each.stage), str(each.tp_rank), _span(each.part.layers)),
            *(_span(each.part.heads), _span(each.part.kv_heads)),
            *(size_text(each.weight_bytes), size_text(each.workspace_bytes)),
            *(f"{each.kv_bytes_per_token:,} B/token", tokens),
        )
    console = table_console()
    console.print(table)
    if stored is not None:
        console.print(
            f"{stored.num_tensors:,} tensors in {_files_text(stored.num_files)} of"
            f" {size_text(stored.num_bytes)} have the names, shapes and dtypes of the model"
        )
    if encoder_bytes:
        size = size_text(encoder_bytes)
        console.print(
            f"{size} of the first rank are the image encoder; an encode worker has it alone"
        )
    total = num_kv_tokens(ranks)
    if total is not None:
        console.print(f"the worker's KV cache holds {total:,} tokens")
    if sequences is not None:
        without = (
            "" if sequences[0] == sequences[1] else f" ({sequences[1]} if no layer had bounds)"
        )
        console.print(f"or {sequences[0]} sequences of {context:,} tokens{without}")


def _files_text(count: int) -> str:
    return "1 file" if count == 1 else f"{count:,} files"


def _files(stored: StoredWeights) -> dict[str, int]:
    return {
        "files": stored.num_files,
        "tensors": stored.num_tensors,
        "bytes": stored.num_bytes,
    }


def _row(rank: RankMemoryPlan) -> dict[str, Any]:
    part = rank.part
    spans = {
        name: [getattr(part, name).start, getattr(part, name).stop]
        for name in ("layers", "heads", "kv_heads", "columns", "vocabulary")
    }
    return {
        "stage": rank.stage,
        "tp_rank": rank.tp_rank,
        **spans,
        "weight_bytes": rank.weight_bytes,
        "workspace_bytes": rank.workspace_bytes,
        "kv_bytes_per_token": rank.kv_bytes_per_token,
        "kv_tokens": rank.num_kv_tokens,
    }


def _span(positions: range) -> str:
    """Formats positions as `0-7`; empty without any."""
    return f"{positions.start}-{positions.stop - 1}" if positions else ""
