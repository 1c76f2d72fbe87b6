"""Prints the README's table of measured figures from the committed results.

python -m benchmarks.readme_table            print it
python -m benchmarks.readme_table --write    put it into README.md
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SERVE_COLUMNS = {
    "load": "load",
    "requests/s": "requests_per_s",
    "tokens/s": "tokens_per_s",
    "TTFT p50 ms": "ttft_p50_ms",
    "TTFT p99 ms": "ttft_p99_ms",
    "ITL p50 ms": "itl_p50_ms",
    "ITL p99 ms": "itl_p99_ms",
    "TPOT p50 ms": "tpot_p50_ms",
    "goodput/s": "goodput_per_s",
}
# result file: title, {column: key in its rows}
TABLES: dict[str, tuple[str, dict[str, str]]] = {
    "serve": ("A whole cluster over HTTP, demo model, client included", SERVE_COLUMNS),
    "serve_fp32": ("The same in FP32, one worker of both roles", SERVE_COLUMNS),
    "serve_poisson": ("The demo model under Poisson arrivals", SERVE_COLUMNS),
    "serve_125m": (
        "A random 125 M Llama in BF16 (`python -m benchmarks.checkpoints`)",
        SERVE_COLUMNS,
    ),
    "engine_cpu": (
        "The engine alone beside transformers' generate, 125 M, BF16, tokens/s",
        {
            "case": "case",
            "Hearth": "hearth_tokens_per_s",
            "transformers": "transformers_tokens_per_s",
            "ratio": "ratio",
        },
    ),
    "engine_overhead": (
        "Where the time of its decode step goes, batch 64, one thread",
        {"part": "part", "ms": "ms", "share": "share", "where": "where"},
    ),
    "kv_transfer": (
        "KV push between two processes, checksums on, GB/s",
        {
            "transfer KiB": "transfer_kib",
            "shared memory": "memfd_gbps",
            "memcpy": "memcpy_gbps",
            "TCP": "tcp_gbps",
            "raw loopback socket": "raw_tcp_gbps",
        },
    ),
}
# What fault of which process: its worst row in any phase of a request.
CHAOS = (
    "32 and more streams, a fault in each phase of a request: the worst of them (`scripts/chaos`)",
    {
        "fault": "fault",
        "process": "process",
        "faults": "num_faults",
        "streams": "streams",
        "lost": "lost",
        "altered": "altered",
        "noticed after s": "detect_s",
        "pause beyond outage and recomputation s": "pause_s",
    },
)
# Results with more rows than a reader wants: their bars, kept or missed.
BARS = {
    "control_plane": "The whole control plane, engines that take no time, beside a peer",
    "simulate": "Placement, fair queue and index on a virtual clock",
    "kv_index": "The prefix index",
    "tenant_limits": "Limits of tenants in Redis",
    "tenant_timing": "What a tenant's timing tells of another's cache",
    "compression": "Weights at rest, and how fast",
    "compression_memory": "Weights in memory for CUDA",
    "compression_engine": "Compressed weights beside dense ones on a CPU",
    "kv_compression": "KV over TCP of stated bandwidths, compression left to the link",
}
BAR_COLUMNS = {"what": "name", "measured": "value", "bar": "bar", "unit": "unit", "holds": "holds"}
BEGIN = "<!-- table: benchmarks/readme_table.py -->\n"
END = "<!-- end of table -->"


def path_of(name: str) -> Path:
    return ROOT / "benchmarks" / "results" / f"{name}.json"


def result(name: str) -> dict[str, Any]:
    return json.loads(path_of(name).read_text())


def table() -> str:
    """Markdown; one block of rows a result file, each with its command and commit."""
    parts = [block(result(name), *of) for name, of in TABLES.items()]
    for name, title in BARS.items():
        if path_of(name).exists():
            found = result(name)
            parts.append(block(found | {"rows": found["bars"]}, title, BAR_COLUMNS))
    chaos = result("chaos")
    parts.append(block(chaos | {"rows": worst_of(chaos["rows"])}, *CHAOS))
    return "\n".join(parts)


def block(found: dict[str, Any], title: str, columns: dict[str, str]) -> str:
    lines = [
        f"**{title}** — {machine_of(found)}, commit `{found['commit']}`, `{found['command']}`",
        "",
        "| " + " | ".join(columns) + " |",
        "| " + " | ".join("---" for _ in columns) + " |",
    ]
    for row in found["rows"]:
        cells = (_shown(row[key]).replace("|", r"\|") for key in columns.values())
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def worst_of(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for all phases of a kill or freeze; sums of what is counted, the longest times."""
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        if row["fault"] in ("kill", "freeze") and "phase" in row:
            found.setdefault((row["fault"], row["process"]), []).append(row)
    return [
        {
            "fault": fault,
            "process": process,
            "num_faults": len(group),
            **{name: sum(row[name] for row in group) for name in ("streams", "lost", "altered")},
            "detect_s": _largest(row["detect_s"] for row in group),
            "pause_s": _largest(row["excess_s"] - (row["outage_s"] or 0.0) for row in group),
        }
        for (fault, process), group in found.items()
    ]


def _largest(values: Iterable[float | None]) -> float | str:
    """Where no request had to move, nobody had to notice."""
    return max((value for value in values if value is not None), default="none")


def machine_of(found: dict[str, Any]) -> str:
    machine = found["machine"]
    return f"{machine['cpu']}, {machine['num_cpus']} cores, {machine['memory_gib']:.0f} GiB"


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "**no**"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def replaced(readme: str) -> str:
    before, rest = readme.split(BEGIN)
    _, after = rest.split(END)
    return before + BEGIN + "\n" + table() + "\n" + END + after


def main() -> None:
    if "--write" in sys.argv:
        path = ROOT / "README.md"
        path.write_text(replaced(path.read_text()))
    else:
        print(table())


if __name__ == "__main__":
    main()
