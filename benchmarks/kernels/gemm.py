"""Products at the shapes of Llama 3.1 8B: dense ones beside the library, split ones beside dense.

`linear`: with few rows the weight's bytes are the cost, so `of_copy` is the weight's size over the
time of a copy that reads and writes as much. `invariant_of_free` is the cost of the fixed order.

`compressed_linear`: `of_dense` is the time of the faster of `linear` and the library over that of
compressed_linear as `kernels.ops` runs it: fused, or decompressed first. By bytes at most 1.33 is
possible. `invariant_of_dense` compares with `linear` alone in its batch-invariant mode, which
workers use. The decode step is that of a full model: its products (no attention), launched as one
CUDA graph, with the weights of all layers in memory, so that none stays in the L2 cache.

2,048 rows are shown without a bar: the kernels are not designed for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from benchmarks.kernels.moves import split
from benchmarks.kernels.timing import Found, by_bandwidth, random, seconds
from benchmarks.report import Bar, Row, at_least, at_most
from kernels import ops
from kernels.gpu.gemm.compressed_linear import compressed_linear as compressed_kernel
from kernels.gpu.gemm.linear import linear as linear_kernel
from kernels.split_weight import SplitWeight

# fused q, k and v; o; fused gate and up; down
LAYER = ((6144, 4096), (4096, 4096), (28_672, 4096), (4096, 14_336))
HEAD = (128_256, 4096)
NUM_LAYERS = 32
NUM_ROWS = (1, 8, 64)
SHAPES = [(m, n, k) for n, k in (*LAYER, HEAD) for m in NUM_ROWS]
MANY_ROWS = (2048, 4096, 4096)
INVARIANT = {"is_batch_invariant": True}

Weights = list[Tensor] | list[SplitWeight]
Product = Callable[[Tensor, Tensor | SplitWeight], Tensor]


def linear() -> Iterator[Found]:
    for shape in SHAPES:
        row = _dense(*shape)
        case, of_free = row["case"], row["invariant_of_free"]
        yield (
            row,
            [
                at_least(f"linear: {case}", row["of_library"], 0.95, "of the library"),
                at_most(f"linear, invariant: {case}", of_free, 1.15, "of the free"),
            ],
        )
    yield _dense(*MANY_ROWS), []


def _dense(m: int, n: int, k: int) -> Row:
    x, weight = random(m, k), random(n, k)
    case = f"{m} x {k} x {n}"
    row = by_bandwidth(
        case, lambda: linear_kernel(x, weight), weight.numel() * weight.element_size()
    )
    library_s = seconds(lambda: torch.nn.functional.linear(x, weight))
    invariant_s = seconds(lambda: linear_kernel(x, weight, **INVARIANT))
    return {
        **row,
        "library_us": round(library_s * 1e6, 1),
        "invariant_us": round(invariant_s * 1e6, 1),
        "of_library": round(library_s * 1e6 / row["us"], 3),
        "invariant_of_free": round(invariant_s * 1e6 / row["us"], 3),
    }


def compressed_linear() -> Iterator[Found]:
    for shape in SHAPES:
        row = _split(*shape)
        yield row, _bars(row)
    yield _split(*MANY_ROWS), []
    for num_rows in NUM_ROWS:
        row = _step(num_rows)
        yield row, _bars(row)


def _bars(row: Row) -> list[Bar]:
    return [
        at_least(f"compressed_linear{kind}: {row['case']}", row[column], 0.95, "of the dense speed")
        for kind, column in (("", "of_dense"), (", invariant", "invariant_of_dense"))
    ]


def _split(m: int, n: int, k: int) -> Row:
    x, weight = random(m, k), random(n, k) * 0.02
    form = split(weight)
    if not torch.equal(compressed_kernel(x, form), linear_kernel(x, weight)):
        raise AssertionError(f"{m} x {k} x {n}: differs from linear")
    fused_s = seconds(lambda: compressed_kernel(x, form))
    return {
        "case": f"{m} x {k} x {n}",
        "fused_us": round(fused_s * 1e6, 1),
        "gb_s": round(form.num_bytes / fused_s / 1e9, 1),
        "bits": round(form.bits_per_weight, 3),
        **_beside(
            seconds(lambda: ops.compressed_linear(x, form)),
            seconds(lambda: linear_kernel(x, weight)),
            seconds(lambda: torch.nn.functional.linear(x, weight)),
            seconds(lambda: ops.compressed_linear(x, form, **INVARIANT)),
            seconds(lambda: linear_kernel(x, weight, **INVARIANT)),
        ),
    }


def _step(m: int) -> Row:
    """Returns the row of a decode step's GEMMs, captured: with the model's dense weights,
    then the split.
    """
    shapes = [*LAYER * NUM_LAYERS, HEAD]
    dense = [random(*shape) * 0.02 for shape in shapes]
    linear_s = _graph_s(m, dense, linear_kernel)
    library_s = _graph_s(m, dense, torch.nn.functional.linear)
    invariant_s = _graph_s(m, dense, lambda x, w: linear_kernel(x, w, **INVARIANT))
    forms = []
    while dense:  # one at a time, to fit in memory
        forms.append(split(dense.pop()))
    forms.reverse()
    split_s = _graph_s(m, forms, ops.compressed_linear)
    split_invariant_s = _graph_s(m, forms, lambda x, w: ops.compressed_linear(x, w, **INVARIANT))
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
