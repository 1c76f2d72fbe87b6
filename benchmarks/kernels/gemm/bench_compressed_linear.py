"""compressed_linear compared with `linear` and the library, at the shapes of Llama-3.1-8B.

`of_dense` is the time of the faster of the two over that of compressed_linear as `kernels.ops` runs
it: fused, or decompressed first. By bytes at most 1.33 is possible; 2,048 rows are slower and
shown. `invariant_of_dense` compares with `linear` alone in its batch-invariant mode, which workers
use. The decode step is that of a full model: its products (no attention), launched as one CUDA
graph, with the weights of all layers in memory, so that none stays in the L2 cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from benchmarks.kernels.timing import random, seconds
from benchmarks.report import Bar, Row, at_least
from kernels import ops
from kernels.gpu.gemm.compressed_linear import compressed_linear
from kernels.gpu.gemm.linear import linear
from kernels.split_weight import SplitWeight, split_weight

# fused q, k and v; o; fused gate and up; down
LAYER = ((6144, 4096), (4096, 4096), (28_672, 4096), (4096, 14_336))
HEAD = (128_256, 4096)
NUM_LAYERS = 32
NUM_ROWS = (1, 8, 64)
MANY_ROWS = 2048

Weights = list[Tensor] | list[SplitWeight]
Product = Callable[[Tensor, Tensor | SplitWeight], Tensor]


def split(weight: Tensor) -> SplitWeight:
    found = split_weight(weight, is_always=True)
    assert found is not None
    return found


def rows() -> Iterator[Row]:
    yield from (_row(m, n, k) for n, k in (*LAYER, HEAD) for m in NUM_ROWS)
    yield _row(MANY_ROWS, 4096, 4096)
    yield from map(_step_row, NUM_ROWS)


def _row(m: int, n: int, k: int) -> Row:
    x, weight = random(m, k), random(n, k) * 0.02
    form = split(weight)
    if not torch.equal(compressed_linear(x, form), linear(x, weight)):
        raise AssertionError(f"{m} x {k} x {n}: differs from linear")
    fused_s = seconds(lambda: compressed_linear(x, form))
    return {
        "case": f"{m} x {k} x {n}",
        "fused_us": round(fused_s * 1e6, 1),
        "gb_s": round(form.num_bytes / fused_s / 1e9, 1),
        "bits": round(form.bits_per_weight, 3),
        **_beside(
            seconds(lambda: ops.compressed_linear(x, form)),
            seconds(lambda: linear(x, weight)),
            seconds(lambda: torch.nn.functional.linear(x, weight)),
            seconds(lambda: ops.compressed_linear(x, form, is_batch_invariant=True)),
            seconds(lambda: linear(x, weight, is_batch_invariant=True)),
        ),
    }


def _step_row(m: int) -> Row:
    """The products of a decode step, captured: with the model's dense weights, then the split."""
    shapes = [*LAYER * NUM_LAYERS, HEAD]
    dense = [random(*shape) * 0.02 for shape in shapes]
    invariant = {"is_batch_invariant": True}
    linear_s = _graph_s(m, dense, linear)
    library_s = _graph_s(m, dense, torch.nn.functional.linear)
    invariant_s = _graph_s(m, dense, lambda x, w: linear(x, w, **invariant))
    forms = []
    while dense:  # one at a time, to fit in memory
        forms.append(split(dense.pop()))
    forms.reverse()
    split_s = _graph_s(m, forms, ops.compressed_linear)
    split_invariant_s = _graph_s(m, forms, lambda x, w: ops.compressed_linear(x, w, **invariant))
    return {
        "case": f"decode step of 8B, batch {m}",
        **_beside(split_s, linear_s, library_s, split_invariant_s, invariant_s),
    }


def _graph_s(m: int, weights: Weights, product: Product) -> float:
    inputs = {k: random(m, k) for k in {weight.shape[1] for weight in weights}}

    def step() -> None:
        for weight in weights:
            product(inputs[weight.shape[1]], weight)

    step()  # compiles, and takes missing measurements
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return seconds(graph.replay)


def _beside(
    split_s: float, linear_s: float, library_s: float, invariant_s: float, linear_invariant_s: float
) -> Row:
    return {
        "us": round(split_s * 1e6, 1),
        "linear_us": round(linear_s * 1e6, 1),
        "library_us": round(library_s * 1e6, 1),
        "invariant_us": round(invariant_s * 1e6, 1),
        "of_dense": round(min(linear_s, library_s) / split_s, 3),
        "invariant_of_dense": round(linear_invariant_s / invariant_s, 3),
    }


def bars(rows: list[Row]) -> list[Bar]:
    return [
        at_least(f"compressed_linear{kind}: {row['case']}", row[column], 0.95, "of the dense speed")
        for row in rows
        if not row["case"].startswith(str(MANY_ROWS))
        for kind, column in (("", "of_dense"), (", invariant", "invariant_of_dense"))
    ]
