"""All GPU benchmarks of kernels: `python -m benchmarks.gpu kernels [op ...]`.

`benchmarks/kernels/table.py` has the measurements and the targets of each. A failing op is reported
and the others continue. If all have run, the result is `benchmarks/results/kernels-<device>.json`.
`scripts/gpu_kit` runs these and everything else that needs a GPU.
"""

from __future__ import annotations

import argparse
import sys
import traceback

from benchmarks.kernels.table import OPS
from benchmarks.report import Bar, Row, write_result


def run(op_name: str) -> tuple[list[Row], list[Bar]]:
    rows: list[Row] = []
    bars: list[Bar] = []
    for row, found in OPS[op_name]():
        rows.append({"op": op_name, **row})
        bars += found
    return rows, bars


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
    command = ["-m", "benchmarks.gpu", *sys.argv[1:]]
    is_full = not failed and set(chosen) == set(OPS)
    write_result(f"kernels-{device}", rows, bars, command, is_full=is_full)
    if failed:
        print(f"benchmarks.gpu: failed: {', '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


def main() -> int:
    parser = argparse.ArgumentParser(description="Runs the GPU benchmarks.")
    parser.add_argument("what", choices=["kernels"])
    parser.add_argument("ops", nargs="*", help="names of ops (default: all)")
    given = parser.parse_args()
    unknown = set(given.ops) - set(OPS)
    if unknown:
        parser.error(f"no such op: {', '.join(sorted(unknown))}; known: {', '.join(sorted(OPS))}")
    return kernels(given.ops or sorted(OPS))


if __name__ == "__main__":
    sys.exit(main())
