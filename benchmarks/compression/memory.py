"""The memory that weights save in their split form (kernels/split_weight.py), and reasons for its
design.

    python -m benchmarks.compression.memory [--model DIR] [--rows 512]

Layers have the shapes of Llama-3.1-8B, with `--rows` random rows: a row's weights follow a
Student-t distribution of 4 or 8 degrees of freedom or a normal one, with a scale of 0.02 · e^(0.3
z), z normal per row. Such exponents have an entropy of 2.6 to 2.8 bits, like trained ones. For a
checkpoint (by default the demo model, cast to BF16) all rows of all matrices are split. `bound` is
a byte plus the entropy of the exponents: the lower limit of codes of single exponents.

The sizes of the variants are computed, not built: codes, exponents in the side table, two words of
32 bits for 32 groups and a base for its rows. A three-bit code stores single exponents separately,
16 bits each with their position. For FP16 a weight has 11 bits and the code.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.report import Row, at_least, at_most, write_result
from kernels.reference.decompress import decompress
from kernels.split_weight import split_weight
from services.cli.cluster.service_options import DEMO_MODEL_DIR
from shared.engine.codec.byte_planes import byte_counts, entropy_bits
from shared.engine.weights.load import open_checkpoint
from shared.engine.weights.weight_source import read_tensor

NUM_LAYERS = 32
# (N, K, number per layer)
LAYER = {
    "q, o": (4096, 4096, 2),
    "k, v": (1024, 4096, 2),
    "gate, up": (14_336, 4096, 2),
    "down": (4096, 14_336, 1),
}
VOCAB = (128_256, 4096)  # shape of the embedding and of the head
NORMS = (2 * NUM_LAYERS + 1) * 4096
FREEDOMS = {"normal": None, "t 8": 8.0, "t 4": 4.0}
MOST_BITS, LEAST_SMALLER = 12.15, 0.21


def drawn(num_rows: int, width: int, freedom: float | None, seed: int = 0) -> Tensor:
    torch.manual_seed(seed)
    scale = 0.02 * torch.exp(0.3 * torch.randn(num_rows, 1))
    if freedom is None:
        return (torch.randn(num_rows, width) * scale).bfloat16()
    return (torch.distributions.StudentT(freedom).sample((num_rows, width)) * scale).bfloat16()


def split_row(case: str, weight: Tensor) -> Row:
    """Measures a split weight, after checking that it decodes to the weight."""
    split, entropy = split_weight(weight), exponent_entropy(weight)
    if split is None:
        return {"case": case, "bits": 16.0, "bound": round(8 + entropy, 3), "wide": None}
    if not torch.equal(decompress(split).view(torch.int16), weight.view(torch.int16)):
        raise AssertionError(f"{case}: decoding differs from the weight")
    return {
        "case": case,
        "bits": round(split.bits_per_weight, 4),
        "bound": round(8 + entropy, 3),
        "wide": round(split.wide_share, 5),
    }


def llama_rows(num_rows: int) -> tuple[list[Row], dict[str, float]]:
    """Returns the size of each layer, and how much smaller the model is, by distribution."""
    rows, smaller = [], {}
    for name, freedom in FREEDOMS.items():
        taken, total = 16.0 * NORMS, NORMS
        shapes = [(case, n, k, NUM_LAYERS * times) for case, (n, k, times) in LAYER.items()]
        for case, n, k, times in [*shapes, ("embedding, head", *VOCAB, 2)]:
            row = split_row(f"8B {case}, {name}", drawn(min(n, num_rows), k, freedom, n))
            rows.append(row)
            taken += row["bits"] * n * k * times
            total += n * k * times
        smaller[name] = 1 - taken / (16 * total)
    return rows, smaller


def checkpoint_rows(model_dir: Path) -> list[Row]:
    """Returns a row for each kind of matrix: matrices of all layers are combined."""
    found: dict[str, list[tuple[int, Row]]] = defaultdict(list)
    with open_checkpoint(model_dir) as tensors:
        for name in tensors.names():
            weight = read_tensor(tensors, name)
            if weight.ndim == 2:
                kind = re.sub(r"\.\d+\.", ".*.", name)
                found[kind].append((weight.numel(), split_row(name, weight.bfloat16())))
    return [joined_row(f"{model_dir.name}: {kind}", rows) for kind, rows in found.items()]


def joined_row(case: str, rows: list[tuple[int, Row]]) -> Row:
    total = sum(size for size, _ in rows)
    means = {
        column: round(sum(size * (row[column] or 0) for size, row in rows) / total, 5)
        for column in ("bits", "bound", "wide")
    }
    return {"case": case, **means}


def fields_of(weight: Tensor, num_mantissa_bits: int, mask: int) -> Tensor:
    return (weight.view(torch.int16) >> num_mantissa_bits & mask).int()


def exponent_entropy(weight: Tensor) -> float:
    """Shannon's bound in bits for the exponents of a BF16 weight."""
    exponents = (weight.view(torch.int16) >> 7 & 0xFF).to(torch.uint8)
    return entropy_bits(byte_counts(exponents.flatten().numpy()))


def wide_share(exponents: Tensor, group: int, window: int, num_rows: int = 1) -> float:
    """Returns the share of groups with an exponent outside the best window of `num_rows` rows."""
    grouped = exponents.view(len(exponents), -1, group)
    first, last = (grouped.amax(-1) - window + 1).clamp(min=0), grouped.amin(-1)
    fits = (first <= last).int()
    edges = torch.zeros(len(exponents), 258, dtype=torch.int32)
    edges.scatter_add_(1, first.long(), fits)
    edges.scatter_add_(1, last.long() + 1, -fits)
    most = edges.cumsum(1).view(-1, num_rows, 258).sum(1).amax(1).sum()
    return 1 - int(most) / fits.numel()


def variants(weight: Tensor) -> Iterator[tuple[str, float, float]]:
    """Yields (name, bits per weight, share of wide groups)"""
    num_rows, width = weight.shape
    exponents = fields_of(weight, 7, 0xFF)

    def bits(share: float, group: int, aside: float, code: int = 4, rows: int = 1) -> float:
        return 8 + code + aside * share + 2 / group + 8 / (rows * width)

    for group in (32, 64, 128):
        share = wide_share(exponents, group, 16)
        yield f"groups of {group}", bits(share, group, 4), share
    share = wide_share(exponents, 64, 16)
    yield "whole exponents aside", bits(share, 64, 8), share
    for rows, name in ((32, "32 rows"), (num_rows, "a tensor")):
        share = wide_share(exponents, 64, 16, rows)
        yield f"a base for {name}", bits(share, 64, 4, rows=rows), share
    share = wide_share(exponents, 64, 15)
    yield "a code kept for zero", bits(share, 64, 4), share
    counts = torch.bincount(exponents.flatten(), minlength=256)
    likely = torch.zeros(256, dtype=torch.bool).index_fill_(0, counts.topk(16).indices, True)
    is_outside = ~likely[exponents.long()].view(num_rows, -1, 64).all(-1)
    share = float(is_outside.float().mean())
    yield "any 16 exponents a tensor", bits(share, 64, 8, rows=num_rows), share
    share = wide_share(exponents, 1, 8)
    yield "three bits, single escapes", 11 + 16 * share + 16 / 256, share
    half = fields_of(weight.half(), 10, 0x1F)
    share = wide_share(half, 64, 16)
    yield "FP16, four bits", 15 + share + 2 / 64 + 8 / width, share


def variant_rows(num_rows: int) -> list[Row]:
    rows: dict[str, Row] = {}
    for name, freedom in FREEDOMS.items():
        for variant, bits, share in variants(drawn(num_rows, 4096, freedom)):
            row = rows.setdefault(variant, {"case": variant})
            row |= {f"bits, {name}": round(bits, 3), f"aside, {name}": round(share, 5)}
    return list(rows.values())


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", type=Path, default=DEMO_MODEL_DIR)
    parser.add_argument("--rows", type=int, default=512, help="rows per layer, a multiple of 32")
    parser.add_argument("--name", default="compression_memory", help="name of the result's file")
    given = parser.parse_args()
    layers, smaller = llama_rows(given.rows)
    rows = [*layers, *checkpoint_rows(given.model), *variant_rows(given.rows)]
    bars = [
        at_most(f"largest layer, {name}", bits, MOST_BITS, "bits a weight")
        for name in FREEDOMS
        for bits in [max(row["bits"] for row in layers if row["case"].endswith(f", {name}"))]
    ]
    bars += [
        at_least(f"model smaller by, {name}", share, LEAST_SMALLER, "of its size in BF16")
        for name, share in smaller.items()
    ]
    write_result(given.name, rows, bars, ["-m", "benchmarks.compression.memory", *sys.argv[1:]])
    return int(not all(bar.holds for bar in bars))


if __name__ == "__main__":
    sys.exit(main())
