"""What the kit consists of, the most valuable first, and how long each part may take.

A part is a module with `run(session)`, in a process of its own. Imports nothing but the standard
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
    module: str = ""  # with its `run`; none: what it measures does not exist
    needs: tuple[str, ...] = ()  # importable modules
    arguments: tuple[str, ...] = ()  # of `run`, after the session


def _part(
    module: str, deadline_s: int, answers: str, needs: tuple[str, ...], of: str = "", name: str = ""
) -> Part:
    """Named as its module, or as what it is run with."""
    arguments = (of,) if of else ()
    return Part(name or of or module, deadline_s, answers, f"{HERE}.{module}", needs, arguments)


PARTS = (
    _part("device_facts", 20, "the roofline of this very machine", TORCH, name="device"),
    _part("gpu_tests", 75, "does it run at all", (*ENGINE, "pytest", "numba"), name="tests"),
    _part("bits", 60, "does a row's result depend on the rows beside it", TORCH),
    _part("host_cost", 50, "what the host pays for a launch and a decode step", TORCH),
    _part("model_8b", 80, "8B shape, batch-invariant", ENGINE, of="exact", name="8b_exact"),
    _part("tools", 60, "accesses outside of tensors", TORCH, of="memcheck"),
    _part("kernel_speeds", 90, "kernels beside libraries", BENCHES, name="kernels"),
    _part("model_8b", 60, "8B shape, the library's products", ENGINE, of="fast", name="8b_fast"),
    _part("handoff", 40, "KV from process to process", (*ENGINE, "uvloop")),
    _part("kernel_speeds", 50, "products with 12-bit weights", BENCHES, of="split_products"),
    _part("tools", 60, "races in shared memory", TORCH, of="racecheck"),
    _part("tools", 40, "why two kernels take their time", TORCH, of="profile"),
    Part("graphs", 0, "decode in CUDA graphs"),
    Part("modes", 0, "which mode `auto` takes: modes.json"),
    Part("fp8_products", 0, "products with FP8 weights"),
    Part("int4_products", 0, "products with INT4 weights"),
    Part("grouped_products", 0, "products of mixtures of experts"),
    Part("mla_decode", 0, "decode attention over latent KV"),
)
