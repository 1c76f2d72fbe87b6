"""The time of recomputing a prompt's block hashes, as each worker does before it accepts a request.

Run: python -m benchmarks.block_hashes [--repetitions 30]

Packed tokens in, hashes compared with those of the message. The best repetition is the figure: the
work is pure Python and C on one core, and anything else on the machine only adds to it.
"""

from __future__ import annotations

import argparse
import os
import time

from benchmarks.report import Row, at_most, write_result
from shared.block_hash import extend_packed, prompt_chain, root_hash
from shared.packing import TOKEN_ID_BYTES, pack_hashes

BLOCK_SIZE = 16
NUM_TOKENS = (1024, 8192, 131_072)
BAR_TOKENS, BAR_MS = 131_072, 3.0


def measure(num_tokens: int, repetitions: int) -> Row:
    root, packed = root_hash("tenant", "weights"), os.urandom(num_tokens * TOKEN_ID_BYTES)
    given = pack_hashes(extend_packed(root, packed, BLOCK_SIZE))
    seconds = []
    for _ in range(repetitions):
        start = time.perf_counter()
        chain = prompt_chain(
            packed, BLOCK_SIZE, cache_root=root, public_root=None, num_public_blocks=0
        )
        assert pack_hashes(chain) == given
        seconds.append(time.perf_counter() - start)
    return {"tokens": num_tokens, "best_ms": round(min(seconds) * 1e3, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--repetitions", type=int, default=30)
    options = parser.parse_args()
    rows = [measure(num_tokens, options.repetitions) for num_tokens in NUM_TOKENS]
    best_ms = {row["tokens"]: row["best_ms"] for row in rows}[BAR_TOKENS]
    bars = [at_most(f"hashing {BAR_TOKENS} tokens", best_ms, BAR_MS, "ms")]
    command = ["-m", "benchmarks.block_hashes", "--repetitions", str(options.repetitions)]
    write_result("block_hashes", rows, bars, command)


if __name__ == "__main__":
    main()
