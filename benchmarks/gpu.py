"""All GPU benchmarks of kernels: `python -m benchmarks.gpu kernels [op ...]`.

Runs `benchmarks/kernels/<folder>/bench_<op>.py`, each of which has `rows()`, the measurements,
and `bars(rows)`, the targets. A failing op is reported and the others continue. Written to
`benchmarks/results/kernels-<device>.json`. `scripts/gpu_kit` runs these and everything else that
needs a GPU.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from importlib import import_module
from pathlib import Path
from types import ModuleType

from benchmarks.report import Bar, Row, write_result

KERNELS = Path(__file__).parent / "kernels"


def folder_of_op() -> dict[str, str]:
    """Each op's folder in `benchmarks/kernels`."""
    paths = KERNELS.glob("*/bench_*.py")
    return {path.stem.removeprefix("bench_"): path.parent.name for path in paths}


def op_names() -> list[str]:
    return sorted(folder_of_op())


def benchmark_of(op_name: str) -> ModuleType:
    """Its `rows()` may yield one row at a time."""
    folder = folder_of_op()[op_name]
    return import_module(f"benchmarks.kernels.{folder}.bench_{op_name}")


def run(op_name: str) -> tuple[list[Row], list[Bar]]:
    bench = benchmark_of(op_name)
    rows = list(bench.rows())
    return [{"op": op_name, **row} for row in rows], bench.bars(rows)


def kernels(chosen: list[str]) -> int:
    import torch

    if not torch.cuda.is_available():
        print("benchmarks.gpu: torch finds no CUDA device", file=sys.stderr)
        return 2
    rows: list[Row] = []
    bars: list[Bar] = []
    failed = []
    for op_name in chosen:
        try:
            more_rows, more_bars = run(op_name)
        except Exception:
            traceback.print_exc()
            failed.append(op_name)
            continue
        rows += more_rows
        bars += more_bars
    device = torch.cuda.get_device_name().replace(" ", "-").lower()
    write_result(f"kernels-{device}", rows, bars, ["-m", "benchmarks.gpu", *sys.argv[1:]])
    if failed:
        print(f"benchmarks.gpu: failed: {', '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


def main() -> int:
    parser = argparse.ArgumentParser(description="Runs the GPU benchmarks.")
    parser.add_argument("what", choices=["kernels"])
    parser.add_argument("ops", nargs="*", help="names of ops (default: all)")
    given = parser.parse_args()
    unknown = set(given.ops) - set(op_names())
    if unknown:
        parser.error(f"no such op: {', '.join(sorted(unknown))}; known: {', '.join(op_names())}")
    return kernels(given.ops or op_names())


if __name__ == "__main__":
    sys.exit(main())
