"""The READMEs' tables of measured figures, from the committed results.

python -m benchmarks.readme_table            print them
python -m benchmarks.readme_table --write    put some rows into README.md, all tables into
                                             benchmarks/README.md
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.gpu_results.table import gpu_summary, gpu_tables

ROOT = Path(__file__).resolve().parent.parent
RESULTS_DIR = ROOT / "benchmarks" / "results"
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
COLOCATION_COLUMNS = {
    name: name
    for name in (
        "workers",
        "step time",
        "chunk tokens",
        "ITL p50 ms",
        "ITL p90 ms",
        "TTFT p90 s",
    )
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
    "role_switch": (
        "Two workers swap prefill and decode under running streams, demo model",
        {
            "streams": "streams",
            "tokens": "tokens",
            "dropped": "dropped",
            "altered": "altered",
            "first token in the new roles s": "first_token_in_new_roles_s",
        },
    ),
    "role_trace": (
        "A trace that turns from prefill-heavy to decode-heavy, real services in virtual time",
        {
            "roles of four workers": "roles",
            "goodput/s": "goodput/s",
            "prefill-heavy": "prefill-heavy goodput/s",
            "decode-heavy": "decode-heavy goodput/s",
            "lost": "lost",
            "changes": "changes",
        },
    ),
    "colocation": (
        "Running streams beside 8k prompts, real processes with the step times of two L40S",
        COLOCATION_COLUMNS,
    ),
    "colocation_virtual": (
        "The same in virtual time, step times of two H100",
        COLOCATION_COLUMNS,
    ),
    "moe": (
        "Decode with 16 experts, 2 a token, beside transformers' three ways, BF16, tokens/s",
        {
            "case": "case",
            "Hearth": "hearth_tokens_per_s",
            "eager": "eager_tokens_per_s",
            "grouped_mm": "grouped_mm_tokens_per_s",
            "batched_mm": "batched_mm_tokens_per_s",
            "ratio": "ratio",
            "least": "ratio_min",
        },
    ),
    "engine_overhead": (
        "Where the time of its decode step goes, batch 64, one thread",
        {"part": "part", "ms": "ms", "share": "share", "where": "where"},
    ),
    "latents": (
        "Decode of latent attention beside transformers, 16 heads of Kimi K2, BF16, tokens/s",
        {
            "case": "case",
            "Hearth": "hearth_tokens_per_s",
            "transformers": "transformers_tokens_per_s",
            "ratio": "ratio",
        },
    ),
    "control_plane": (
        "The control plane beside Dynamo's, engines that take no time",
        {
            "server": "server",
            "shape": "shape",
            "at once": "concurrency",
            "client": "client",
            "requests/s": "requests_per_s",
            "TTFT p50 ms": "ttft_p50_ms",
            "TTFT p99 ms": "ttft_p99_ms",
            "CPU ms a request": "servers_cpu_ms",
        },
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
    "tenant_limits": (
        "What limits of tenants in Redis cost a request",
        {
            "case": "case",
            "at once": "at once",
            "requests/s": "requests/s",
            "wait p50 us": "wait p50 us",
            "wait p99 us": "wait p99 us",
            "gateway CPU us": "gateway CPU us",
            "Redis CPU us": "redis CPU us",
        },
    ),
}
# Faults by kind and process: the worst row over all phases of a request.
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
# Results with too many rows for a reader: only their bars are shown.
BARS = {
    "prefix_and_memory": "A cached prefix, and what a cluster holds in memory",
    "control_plane": "The whole control plane, engines that take no time, beside a peer",
    "simulate": "Placement, fair queue and index on a virtual clock",
    "sites_prefill": "Prefill at another site at the speeds of a published case, in virtual time",
    "sites_pair": "Two sites 100 ms and 1 Gb/s apart, real services in virtual time",
    "sites_placement": "300 sites and 10,000 workers in virtual time, on a machine with other load",
    "residency": "Which models are hot, simulated: the demand policy beside others",
    "kv_index": "The prefix index",
    "stop_strings": "Stop strings, CPU time of a character in text that nearly matches",
    "tenant_timing": "What a tenant's timing tells of another's cache",
    "compression": "Weights at rest, and how fast",
    "compression_memory": "Weights in memory for CUDA",
    "compression_engine": "Compressed weights beside dense ones on a CPU",
    "quantized_memory": "Peak memory of 2,048 prompt tokens with INT4 experts on a CPU",
    "quantized": "Weights of four and eight bits beside BF16 on a CPU",
    "kv_compression": "KV over TCP of stated bandwidths, compression left to the link",
    "parked_workers": "Eight parked workers of one host, 125 M in BF16, weights shared",
    "chaos_nats": "The same faults, requests over NATS",
    "chaos_constrained": "Kills and freezes of decode, streams under grammars and calls of tools",
    "chaos_hosts": "A host of three models is killed or frozen under load (`--hosts`)",
    "chaos_links": "A link between two sites is cut for 30 s, 20 times (`--cuts 20`)",
    "chaos_sites": "Faults of links and sites under streams that cross them (`--sites`)",
    "sites_live": "Two linked sites of real processes, with load for one of them",
    "ranks": "Workers of several ranks beside one process",
    "slow_links": "Ranks over slow links between hosts",
    "chaos_soak": "A steady load without a fault",
    "transports": "Dialects and transports of one gateway, engines that take no time, by turns",
    "launch_cost": "The host's time of the launches of a layer of Llama 3.1 8B, without a GPU",
    "telemetry": "Traces of requests beside none, the whole control plane, by turns",
    "page": "The gateway's page, and what a tab of the cluster costs",
    "adversity": "Failing devices, doubled identities, greedy tenants, distance and attackers",
}
BAR_COLUMNS = {"what": "name", "measured": "value", "bar": "bar", "unit": "unit", "holds": "holds"}
BEGIN = "<!-- table: {} -->\n"
DIRTY = "-dirty"  # suffix of the commit if the tree had changes
UNKNOWN = "unknown"  # commit of a tree without git
END = "<!-- end of table -->"
SUMMARY = "summary (benchmarks/readme_table.py)"
RESULTS = "results (benchmarks/readme_table.py)"
GPU = "on GPUs (benchmarks/gpu_results/table.py)"


def path_of(name: str) -> Path:
    return RESULTS_DIR / f"{name}.json"


def result(name: str) -> dict[str, Any]:
    return json.loads(path_of(name).read_text())


def summary() -> str:
    """Returns Markdown: the rows of README.md, each with the command that measures it."""
    lines = ["| what | measured | command |", "| --- | --- | --- |"]
    for what, name, measured in SUMMARY_ROWS:
        found = result(name)
        lines.append(f"| {what} | {measured(found)} | `{found['command']}` |")
    return "\n".join([*lines, *gpu_summary()]) + "\n"


def tables() -> str:
    """Returns Markdown: one block of rows per result file, each with its command and commit, and
    the missed bars of all others.
    """
    parts = [block(result(name), *of) for name, of in TABLES.items()]
    for name, title in BARS.items():
        found = result(name)
        parts.append(block(found | {"rows": found["bars"]}, title, BAR_COLUMNS))
    chaos = result("chaos")
    parts.append(block(chaos | {"rows": worst_of(chaos["rows"])}, *CHAOS))
    names = (path.stem for path in sorted(RESULTS_DIR.glob("*.json")))
    parts.append(missed({name: result(name) for name in names if name not in BARS}))
    return "\n".join(parts)


def missed(results: Mapping[str, dict[str, Any]]) -> str:
    """Returns the bars that do not hold, of results by name."""
    lines = ["**Missed bars of results that have no table of bars here**", ""]
    lines += ["| result | what | measured | bar | unit | commit |", "| --- " * 6 + "|"]
    for name, found in results.items():
        for bar in found["bars"]:
            if not bar["holds"]:
                cells = (name, *(_shown(bar[key]) for key in ("name", "value", "bar", "unit")))
                lines.append(f"| {' | '.join(cells)} | `{found['commit']}` |")
    return "\n".join(lines) + "\n"


def block(found: dict[str, Any], title: str, columns: dict[str, str]) -> str:
    """Raises ValueError for a result that no commit reproduces, and for one without rows."""
    if found["commit"].endswith((DIRTY, UNKNOWN)):
        raise ValueError(f"the table {title!r} of {found['command']!r} is of an uncommitted tree")
    if not found["rows"]:
        raise ValueError(f"the table {title!r} of {found['command']!r} would have no rows")
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
    """Returns one row for all phases of a kill or freeze; sums of counts, the longest times."""
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
    """Returns the largest value; "none" if no request moved, so that nothing was detected."""
    return max((value for value in values if value is not None), default="none")


def machine_of(found: dict[str, Any]) -> str:
    machine = found["machine"]
    return f"{machine['cpu']}, {machine['num_cpus']} cores, {machine['memory_gib']:.0f} GiB"


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "**no**"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _row(found: dict[str, Any], key: str, value: object) -> dict[str, Any]:
    """Returns the row, or the bar, whose `key` is `value`."""
    return next(each for each in [*found["rows"], *found["bars"]] if each.get(key) == value)


def _cluster(found: dict[str, Any]) -> str:
    alone, some, many = (_row(found, "load", f"closed {users}") for users in (1, 16, 64))
    first = (f"{row['ttft_p50_ms']:.0f} / {row['ttft_p99_ms']:.0f}" for row in (alone, some))
    return (
        f"64 clients {many['tokens_per_s']:,.0f} tokens/s; TTFT p50 / p99 "
        f"{' ms alone, '.join(first)} ms with 16"
    )


def _beside_peer(found: dict[str, Any]) -> str:
    """Returns the requests per second over the peer's, by shape: the lowest and the
    highest of all loads.
    """
    rates: dict[tuple[str, int, str], dict[str, float]] = {}
    for row in found["rows"]:
        load = (row["shape"], row["concurrency"], row["client"])
        rates.setdefault(load, {})[row["server"]] = row["requests_per_s"]
    spans = []
    for shape, name in (("split", "prefill and decode apart"), ("one", "one worker")):
        of_shape = [each for load, each in rates.items() if load[0] == shape]
        ratios = sorted(each["hearth"] / each["dynamo"] for each in of_shape)
        spans.append(f"{name} {ratios[0]:.2f} to {ratios[-1]:.2f} x")
    return "requests/s as a multiple of Dynamo's: " + ", ".join(spans)


def _worst_pause(found: dict[str, Any]) -> str:
    rows = worst_of(found["rows"])
    pause = max(row["pause_s"] for row in rows)
    streams, faults = (sum(row[name] for row in rows) for name in ("streams", "num_faults"))
    lost, altered = (sum(row[name] for row in rows) for name in ("lost", "altered"))
    decode = {row["fault"]: row["pause_s"] for row in rows if row["process"] == "decode-1"}
    return (
        f"{decode['kill']:.2f} s, {decode['freeze']:.2f} s; of any process {pause:.2f} s, without "
        f"outage and recomputation; {streams:,} streams, {faults} faults, {lost} lost, {altered} "
        "altered"
    )


def _weight_bytes(found: dict[str, Any]) -> str:
    bits = _row(found, "name", "8B shapes, usual: bits a weight at rest")["value"]
    smaller = _row(found, "name", "8B shapes, usual: bundle smaller by")["value"]
    return f"{bits:.1f} bits a BF16 weight, files {smaller:.0%} smaller, bit for bit the same"


SUMMARY_ROWS: tuple[tuple[str, str, Callable[[dict[str, Any]], str]], ...] = (
    ("Cluster over HTTP, demo model of 5 M parameters", "serve", _cluster),
    ("Control plane beside Dynamo, no engine time", "control_plane", _beside_peer),
    ("Longest pause after a kill, a freeze of a decode worker", "chaos", _worst_pause),
    ("Weight bytes at rest, shapes of Llama 3.1 8B", "compression", _weight_bytes),
)


def replaced(readme: str, name: str, content: str) -> str:
    """Returns the README with `content` between the markers of the table `name`."""
    begin = BEGIN.format(name)
    before, rest = readme.split(begin)
    _, after = rest.split(END, 1)
    return before + begin + content + END + after


def written() -> dict[Path, str]:
    """Returns the READMEs with figures, with their expected content."""
    front, results = ROOT / "README.md", ROOT / "benchmarks" / "README.md"
    return {
        front: replaced(front.read_text(), SUMMARY, summary()),
        results: replaced(replaced(results.read_text(), RESULTS, tables()), GPU, gpu_tables()),
    }


def main() -> None:
    if "--write" in sys.argv:
        for path, text in written().items():
            path.write_text(text)
    else:
        print(summary(), tables(), sep="\n")


if __name__ == "__main__":
    main()
