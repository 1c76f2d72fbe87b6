"""A timeline as aligned bars: one row for each phase, on one axis of time."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from shared.telemetry.timeline import Phase, Timeline, Try

BAR_CELLS = 40
GIB, MIB, KIB = 1 << 30, 1 << 20, 1 << 10


def timeline_parts(timeline: Timeline) -> Iterator[RenderableType]:
    yield Text(_summary(timeline))
    table = Table(box=None, pad_edge=False, show_edge=False)
    for name, justify in (("phase", "left"), ("process", "left"), ("ms", "right")):
        table.add_column(name, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    table.add_column("time", no_wrap=True)
    table.add_column("", no_wrap=True)
    total_s = max(timeline.duration_s, 1e-9)
    for phase in timeline.gateway_phases:
        _add_row(table, phase, total_s)
    for each in timeline.tries:
        table.add_row(Text(_title(each), style="bold"))
        for phase in each.phases:
            _add_row(table, phase, total_s)
    yield table


def bar(start_s: float, duration_s: float, total_s: float) -> str:
    """At least one cell, within BAR_CELLS."""
    first = min(int(start_s / total_s * BAR_CELLS), BAR_CELLS - 1)
    end = min(max(first + 1, round((start_s + duration_s) / total_s * BAR_CELLS)), BAR_CELLS)
    return " " * first + "█" * (end - first)


def _add_row(table: Table, phase: Phase, total_s: float) -> None:
    table.add_row(
        f"  {phase.name}",
        Text(phase.process_id),
        f"{phase.duration_s * 1000:.2f}",
        bar(phase.start_s, phase.duration_s, total_s),
        _amounts(phase),
    )


def _summary(timeline: Timeline) -> str:
    ttft = "" if timeline.ttft_s is None else f", first token after {timeline.ttft_s * 1000:.1f} ms"
    late = f", {timeline.num_late_masks} late masks" if timeline.num_late_masks else ""
    return (
        f"{timeline.request_id}  {timeline.model}  tenant {timeline.tenant_id}  "
        f"{timeline.status} {timeline.outcome}\n"
        f"{timeline.duration_s * 1000:.1f} ms{ttft}; tokens: {timeline.num_prompt_tokens} prompt "
        f"({timeline.num_cached_tokens} cached), {timeline.num_output_tokens} output; "
        f"{timeline.num_resubmissions} resubmissions{late}"
    )


def _title(each: Try) -> str:
    prefill = f", prefill {each.prefill_worker_id}" if each.prefill_worker_id else ""
    return f"try {each.number}: {each.worker_id or 'not placed'}{prefill}: {each.outcome}"


def _amounts(phase: Phase) -> str:
    parts = []
    if phase.num_bytes:
        parts.append(_bytes(phase.num_bytes))
    if phase.num_tokens:
        parts.append(f"{phase.num_tokens} tokens")
    if phase.num_steps:
        parts.append(f"{phase.num_steps} steps")
    return ", ".join(parts)


def _bytes(num_bytes: int) -> str:
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:.1f} {name}"
    return f"{num_bytes} B"
