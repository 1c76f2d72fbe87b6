"""A timeline as aligned bars: one row for each phase, on one axis of time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from shared.telemetry.timeline import Phase, Timeline, Try

MIN_BAR_CELLS, MAX_BAR_CELLS = 10, 40
GAP_CELLS = 4 * 2  # gaps of five columns
PHASE_CELLS, MS_CELLS, AMOUNT_CELLS = 14, 9, 19
GIB, MIB, KIB = 1 << 30, 1 << 20, 1 << 10


def timeline_parts(timeline: Timeline, width: int) -> Iterator[RenderableType]:
    """Yields the parts of a timeline. `width` is that of the terminal, in cells; the bars get what
    is left of it.
    """
    tables = _Tables(timeline, width)
    yield Text(_summary(timeline))
    yield tables.of(timeline.gateway_phases)
    for each in timeline.tries:
        yield Text(_title(each), style="bold")
        yield tables.of(each.phases)
        yield from (Text(_push_text(phase)) for phase in each.phases if phase.port)


def bar(start_s: float, duration_s: float, total_s: float, num_cells: int) -> str:
    """Draws a bar of at least one cell within `num_cells`."""
    first = min(int(start_s / total_s * num_cells), num_cells - 1)
    end = min(max(first + 1, round((start_s + duration_s) / total_s * num_cells)), num_cells)
    return " " * first + "█" * (end - first)


class _Tables:
    """Tables whose columns are aligned with each other."""

    def __init__(self, timeline: Timeline, width: int) -> None:
        parts = (timeline.gateway_phases, *(each.phases for each in timeline.tries))
        self._process_cells = max((len(p.process_id) for part in parts for p in part), default=0)
        left = width - PHASE_CELLS - self._process_cells - MS_CELLS - AMOUNT_CELLS - GAP_CELLS
        self._bar_cells = min(max(left, MIN_BAR_CELLS), MAX_BAR_CELLS)
        self._total_s = max(timeline.duration_s, 1e-9)

    def of(self, phases: Iterable[Phase]) -> Table:
        table = Table(box=None, pad_edge=False, show_edge=False, show_header=False)
        table.add_column(width=PHASE_CELLS, no_wrap=True)
        table.add_column(width=self._process_cells, no_wrap=True)
        table.add_column(width=MS_CELLS, justify="right", no_wrap=True)
        table.add_column(width=self._bar_cells, no_wrap=True)
        table.add_column(no_wrap=True)
        for phase in phases:
            cells = (phase.start_s, phase.duration_s, self._total_s, self._bar_cells)
            table.add_row(
                f"  {phase.name}",
                Text(phase.process_id),
                f"{phase.duration_s * 1000:.1f} ms",
                bar(*cells),
                _amounts(phase),
            )
        return table


def _summary(timeline: Timeline) -> str:
    ttft = "" if timeline.ttft_s is None else f", first token after {timeline.ttft_s * 1000:.1f} ms"
    late = f", {timeline.num_late_masks} late masks" if timeline.num_late_masks else ""
    return (
        f"{timeline.request_id}  {timeline.model}  tenant {timeline.tenant_id}  "
        f"{timeline.status} {timeline.outcome}\n"
        f"{timeline.duration_s * 1000:.1f} ms{ttft}; tokens: {timeline.num_prompt_tokens} prompt "
        f"({timeline.num_cached_tokens} cached), {timeline.num_output_tokens} output; "
        f"{_counted(timeline.num_resubmissions, 'resubmission')}{late}"
    )


def _title(each: Try) -> str:
    prefill = f", prefill {each.prefill_worker_id}" if each.prefill_worker_id else ""
    title = f"try {each.number}: {each.worker_id or 'not placed'}{prefill}: {each.outcome}"
    if each.move is None:
        return title
    workers = " and ".join(each.move.from_workers)
    return f"{title}; continued the answer of {workers} after a pause of {each.move.pause_s:.2f} s"


def _push_text(phase: Phase) -> str:
    return (
        f"  {phase.name}: over {phase.port}, {_counted(phase.num_copies, 'copy', 'copies')} of "
        f"each byte, predicted {phase.predicted_s * 1000:.1f} ms"
    )


def _amounts(phase: Phase) -> str:
    parts = []
    if phase.num_bytes:
        parts.append(_bytes(phase.num_bytes))
    if phase.num_tokens:
        parts.append(_counted(phase.num_tokens, "token"))
    if phase.num_steps:
        parts.append(_counted(phase.num_steps, "step"))
    return ", ".join(parts)


def _counted(count: int, noun: str, nouns: str = "") -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {nouns or noun + 's'}"


def _bytes(num_bytes: int) -> str:
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:.1f} {name}"
    return f"{num_bytes} B"
