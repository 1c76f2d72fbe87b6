"""The parts of the kit, the most valuable first, with the time limit of each.

A part is a module with `run(session)`, run in a separate process. Imports only the standard
library: the kit must start wherever Python does.
"""

from __future__ import annotations

from dataclasses import dataclass

HERE = "benchmarks.gpu_kit"
BUDGET_S = 540  # of all parts together

TORCH = ("torch", "triton")
BENCHES = (*TORCH, "msgspec", "rich")
ENGINE = (*TORCH, "numpy", "msgspec", "structlog", "safetensors", "xxhash", "zstandard")


@dataclass(frozen=True)
class Part:
    name: str
    deadline_s: int
    answers: str
    module: str = ""  # has `run`; empty: the feature does not exist yet
    needs: tuple[str, ...] = ()  # importable modules
    arguments: tuple[str, ...] = ()  # of `run`, after the session


def _part(
    module: str, deadline_s: int, answers: str, needs: tuple[str, ...], of: str = "", name: str = ""
) -> Part:
    """A part named after its module or its argument."""
    arguments = (of,) if of else ()
    return Part(name or of or module, deadline_s, answers, f"{HERE}.{module}", needs, arguments)


PARTS = (
    _part("device_facts", 20, "this machine's roofline", TORCH, name="device"),
    _part("gpu_tests", 75, "all GPU tests", (*ENGINE, "pytest", "numba"), name="tests"),
    _part("bits", 60, "whether a row's bits depend on the other rows", TORCH),
    _part("host_cost", 50, "the host's time for a launch and a decode step", TORCH),
    _part("model_8b", 80, "8B shape, batch-invariant", ENGINE, of="exact", name="8b_exact"),
    _part("tools", 60, "out-of-bounds accesses", TORCH, of="memcheck"),
    _part("kernel_speeds", 90, "kernels compared with libraries", BENCHES, name="kernels"),
    _part("model_8b", 60, "8B shape, the library's products", ENGINE, of="fast", name="8b_fast"),
    _part("handoff", 40, "KV from process to process", (*ENGINE, "uvloop")),
    _part("kernel_speeds", 50, "products with 12-bit weights", BENCHES, of="split_products"),
    _part("tools", 60, "races in shared memory", TORCH, of="racecheck"),
    _part("tools", 40, "the bottlenecks of two kernels", TORCH, of="profile"),
    Part("graphs", 0, "decode in CUDA graphs"),
    Part("modes", 0, "the mode that `auto` selects: modes.json"),
    Part("fp8_products", 0, "products with FP8 weights"),
    Part("int4_products", 0, "products with INT4 weights"),
    Part("grouped_products", 0, "products of mixtures of experts"),
    Part("mla_decode", 0, "decode attention over latent KV"),
)
