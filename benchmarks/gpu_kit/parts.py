"""The parts of the kit and the calls that run them, the most valuable first.

A part is a module with `run(session, *arguments)`, run in a separate process. Imports only the
standard library: the kit must start wherever Python does.
"""

from __future__ import annotations

from dataclasses import dataclass

HERE = "benchmarks.gpu_kit"
RESERVED_S = 25  # time for unpacking, probes and the end of the last part

TORCH = ("torch", "triton", "numpy")
BENCHES = (*TORCH, "msgspec", "rich")
ENGINE = (*TORCH, "msgspec", "structlog", "safetensors", "xxhash", "zstandard")
HTTP = ("httptools", "httpx", "litestar", "multidict", "uvicorn", "uvloop")
OTHERS = ("cryptography", "llguidance", "nats", "numba", "psutil", "redis", "tiktoken")
CLUSTER = (*ENGINE, *HTTP, *OTHERS)


@dataclass(frozen=True)
class Part:
    name: str
    deadline_s: int
    answers: str
    module: str  # has `run`
    needs: tuple[str, ...] = ()  # importable modules
    arguments: tuple[str, ...] = ()  # arguments of `run` after the session


@dataclass(frozen=True)
class Call:
    """One command on the device's machine, of at most `limit_s`."""

    limit_s: int
    parts: tuple[str, ...]


def _part(
    module: str, deadline_s: int, answers: str, needs: tuple[str, ...], of: str = "", name: str = ""
) -> Part:
    """Returns a part named after its module or its argument."""
    arguments, last = (of,) if of else (), module.rpartition(".")[2]
    return Part(name or of or last, deadline_s, answers, f"{HERE}.{module}", needs, arguments)


PARTS = (
    # Call a: contact.
    _part("machine.device_facts", 12, "this machine, its tools, its ceilings", TORCH, name="facts"),
    _part("kernels.smoke", 25, "whether each kernel computes what torch computes", TORCH),
    _part("models.graph_step", 30, "the device's own time of a decode step", ENGINE),
    _part("kernels.mma_bits", 10, "whether tile widths change the bits of a product", TORCH),
    _part("models.prefill", 25, "the device's own time of a prompt", ENGINE),
    _part("kernels.tools", 25, "the time of each kernel of a step", ENGINE, of="profile"),
    # Call b: the engine.
    _part("models.model_8b", 40, "8B shape, batch-invariant", ENGINE, of="exact", name="8b_exact"),
    _part("models.model_8b", 30, "8B shape, the library's GEMM", ENGINE, of="fast", name="8b_fast"),
    _part("models.graphs", 20, "whether graphs of decode steps compute the same tokens", ENGINE),
    _part("kernels.bits", 25, "whether a row's bits depend on the other rows", ENGINE),
    _part("models.modes", 25, "the mode that `auto` selects", ENGINE),
    _part("models.handoff", 20, "KV from process to process", ENGINE),
    _part("kernels.products", 10, "products in lanes", TORCH, of="lanes"),
    _part("kernels.products", 10, "products of mixtures of experts", TORCH, of="grouped"),
    _part("kernels.latent", 10, "attention over latents", TORCH),
    _part("kernels.products", 5, "products with INT4 weights", TORCH, of="int4_products"),
    _part("kernels.products", 5, "products with FP8 weights", TORCH, of="fp8_products"),
    # Call c: what is left.
    _part("models.experts", 25, "layers with experts beside their roof", ENGINE),
    _part("kernels.gpu_tests", 50, "a test of each kernel", ENGINE, of="first", name="tests"),
    _part("machine.copies", 20, "bandwidths between host and device", TORCH),
    _part("kernels.tools", 35, "out-of-bounds accesses", TORCH, of="memcheck"),
    # Call d: the cluster.
    _part(
        "models.serve", 85, "a cluster: one worker for both roles", CLUSTER, of="both", name="serve"
    ),
    _part(
        "models.serve",
        100,
        "a cluster: prefill and decode apart on one GPU",
        CLUSTER,
        of="apart",
        name="serve_apart",
    ),
    # Parts that run only when they are named.
    _part("kernels.gpu_tests", 200, "all other tests", (*ENGINE, "numba"), of="rest"),
    _part("kernels.tools", 60, "races in shared memory", TORCH, of="racecheck"),
    _part("kernels.tools", 30, "the bottlenecks of four launches", ENGINE, of="ncu"),
    _part("kernels.kernel_speeds", 90, "kernels beside libraries", BENCHES, name="kernels"),
    _part("machine.checkpoint", 40, "a start with weights in files", ENGINE),
    _part("models.captures", 30, "captures beside steps, copies and failures", ENGINE),
    _part("models.park", 25, "a worker that parks and wakes, 8B shape", ENGINE),
    _part("kernels.attention", 15, "attention of prompts by cuDNN beside ours", ENGINE),
    _part("models.rank_process", 60, "decode steps through a rank process, and its loss", CLUSTER),
    _part("kernels.tilings", 40, "GEMMs with other tiles", TORCH),
    _part("kernels.kernel_speeds", 50, "12-bit weights", BENCHES, of="split_products"),
)
NAMES = tuple(part.name for part in PARTS)
CALLS = {
    "a": Call(155, NAMES[: NAMES.index("8b_exact")]),
    "b": Call(225, NAMES[NAMES.index("8b_exact") : NAMES.index("experts")]),
    "c": Call(155, NAMES[NAMES.index("experts") : NAMES.index("serve")]),
    "d": Call(210, NAMES[NAMES.index("serve") : NAMES.index("rest")]),
}


def parts_named(names: tuple[str, ...]) -> tuple[Part, ...]:
    return tuple(part for part in PARTS if part.name in names)
