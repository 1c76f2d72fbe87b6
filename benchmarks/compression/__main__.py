"""Lossless weights: how small, and how fast to encode and decode.

    python -m benchmarks.compression [--model DIR ...] [--layers 1] [--rows-divisor 4] [--threads 2]

At rest: bundles as `hearth compress` writes them, of the demo model, of every checkpoint given, and
of synthetic weights in the shapes of Llama 3.1 8B (`llama_weights.py` states their statistics). For
these, the requested number of layers and a part of the rows of each matrix are made and encoded;
the model's size follows from the bits per weight of each kind and its number of weights in the
model. Every bundle is also decompressed, and compared with its folder file by file.

Speeds are in original bytes (two per BF16 weight). `hearth compress` encodes, writes, syncs,
decodes again and compares; `open_checkpoint` is how a worker loads, including checksums, compared
with loading the uncompressed folder from the page cache; the codec alone goes from memory to
memory. Medians, with the CPU time of all threads. Everything runs on as many CPUs as threads.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.compression.at_rest import at_rest
from benchmarks.report import write_result


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.compression",
        description=(__doc__ or "").partition("\n")[0],
    )
    parser.add_argument("--model", type=Path, nargs="*", default=[], help="checkpoint folders")
    parser.add_argument("--layers", type=int, default=1, help="number of synthetic layers")
    parser.add_argument("--rows-divisor", type=int, default=4, help="divisor of the matrices' rows")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args(argv)
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.threads])
    rows, bars = at_rest(
        options.model,
        num_layers=options.layers,
        rows_divisor=options.rows_divisor,
        rounds=options.rounds,
        num_threads=options.threads,
    )
    write_result("compression", rows, bars, ["-m", "benchmarks.compression", *argv])


if __name__ == "__main__":
    main(sys.argv[1:])
