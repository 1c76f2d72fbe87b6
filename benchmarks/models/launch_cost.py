"""The host's time of the kernel launches of a layer of Llama 3.1 8B: Triton's part, and the rest.

It needs no GPU: tensors are on the CPU, in memory that nothing touches, and a fake driver receives
the launches. What a device adds to a launch is therefore missing: the driver's call, and the
library's GEMMs in the fast mode and copies, each of which costs an allocation here.

One layer is timed by turns as it is, and with a clock around each operation and around Triton's
`run`. All times are the least of many, in us; `own` is all but Triton.

    python -m benchmarks.models.launch_cost [--steps 300]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args
from unittest.mock import patch

import torch
from torch import Tensor
from triton.runtime.jit import JITFunction

from benchmarks.gpu_kit.dry.dry_tensors import lazy_memory, library_products
from benchmarks.gpu_kit.model_steps.inputs import decode_step, mixed_step, prefill_step
from benchmarks.gpu_kit.models.dummy_model import make_executor
from benchmarks.gpu_kit.session import Session
from benchmarks.gpu_kit.shapes import CONFIG_8B
from benchmarks.report import Bar, Row, at_most, write_result
from kernels import ops
from shared.engine.executors.loading.model_loading import set_mode
from shared.engine.executors.step_computer import StepComputer
from shared.engine.step import StepInputs
from shared.numerics import Mode
from tests.support.kernels.triton_ops import triton_ops

LAYERS, BLOCK_SIZE, CONTEXT, CHUNK = 8, 64, 2048, 512
STEPS = {
    "decode of 1": decode_step(1, CONTEXT, BLOCK_SIZE),
    "decode of 64": decode_step(64, CONTEXT, BLOCK_SIZE),
    f"prefill of {CHUNK}": prefill_step(CONTEXT - CHUNK, CHUNK, BLOCK_SIZE),
    f"{CHUNK} of a prompt beside 64": mixed_step(64, CONTEXT, CHUNK, BLOCK_SIZE),
}
LAYER, LIBRARY = "layer", "linear of the library"
MAX_OWN_US = 20.0  # of a launch, outside Triton
_empty = torch.empty

Call = Callable[[], object]


@dataclass
class Cost:
    calls: int = 0
    launches: int = 0
    seconds: float = 0.0
    triton_s: float = 0.0

    def row(self, num_layers: int) -> Row:
        """Returns the columns of one layer."""
        scale = 1e6 / num_layers
        return {
            "calls": self.calls // num_layers,
            "launches": self.launches // num_layers,
            "us": round(self.seconds * scale, 1),
            "triton us": round(self.triton_s * scale, 1),
            "own us": round((self.seconds - self.triton_s) * scale, 1),
        }


@dataclass
class Clock:
    """While patched in, adds up the time of operations and of their launches."""

    costs: defaultdict[str, Cost] = field(default_factory=lambda: defaultdict(Cost))
    _current: Cost = field(default_factory=Cost)

    @contextmanager
    def patched(self) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(patch.object(JITFunction, "run", self._run(JITFunction.run)))
            linear = self._operation(LIBRARY, torch.nn.functional.linear)
            stack.enter_context(patch.object(torch.nn.functional, "linear", linear))
            for each in vars(ops).values():
                if isinstance(each, ops.Operation):
                    timed = self._operation(each.name, each.on_cpu)
                    stack.enter_context(patch.object(each, "on_cpu", timed))
            yield

    def _run(self, run: Any) -> Any:
        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            kernel = run(*args, **kwargs)
            self._current.triton_s += time.perf_counter() - started
            self._current.launches += 1
            return kernel

        return timed

    def _operation(self, name: str, function: Any) -> Any:
        def timed(*args: Any, **kwargs: Any) -> Any:
            self._current = self.costs[name]
            self._current.calls += 1
            started = time.perf_counter()
            result = function(*args, **kwargs)
            self._current.seconds += time.perf_counter() - started
            return result

        return timed


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, engine_without_device():
        rows = measure(make_model(Path(name)), options.steps)
    command = ["-m", "benchmarks.models.launch_cost", *sys.argv[1:]]
    write_result("launch_cost", rows, list(bars_of(rows)), command)


@contextmanager
def engine_without_device() -> Iterator[None]:
    def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return _empty((*x.shape[:-1], weight.shape[0]), dtype=x.dtype)

    def joined(parts: Sequence[Tensor]) -> Tensor:
        return _empty((sum(map(len, parts)), *parts[0].shape[1:]), dtype=parts[0].dtype)

    with (
        torch.inference_mode(),
        triton_ops("ttir"),
        lazy_memory(),
        library_products(),
        patch.object(torch.nn.functional, "linear", product),
        patch.object(torch, "cat", joined),
    ):
        yield


def make_model(folder: Path) -> StepComputer:
    session = Session("launch_cost", folder / "rows.jsonl", mode="compile")
    config = CONFIG_8B | {"num_hidden_layers": LAYERS}
    num_blocks = 65 * CONTEXT // BLOCK_SIZE
    sizes = {"num_blocks": num_blocks, "num_positions": CONTEXT}
    return make_executor(session, config, "exact", **sizes)


def measure(executor: StepComputer, num_steps: int) -> list[Row]:
    rows = []
    for mode in get_args(Mode):
        set_mode(executor.model, mode)
        for name, step in STEPS.items():
            call = layers_of(executor, step)
            for operation, cost in least_costs(call, num_steps).items():
                rows.append({"mode": mode, "step": name, "operation": operation} | cost.row(LAYERS))
    return rows


def bars_of(rows: Sequence[Row]) -> Iterator[Bar]:
    for row in rows:
        if row["operation"] == LAYER:
            name = f"{row['mode']}, {row['step']}: a launch outside Triton"
            yield at_most(name, row["own us"] / row["launches"], MAX_OWN_US, "us")


def layers_of(executor: StepComputer, step: StepInputs) -> Call:
    """Returns the step's layers, without embedding and head: nothing in them is computed."""
    model: Any = executor.model
    inputs = executor.device_inputs(step, samples_on_device=True)
    cos, sin = (each.index_select(0, inputs.positions)[:, 0] for each in (model.cos, model.sin))
    shape = len(inputs.positions), CONFIG_8B["hidden_size"]
    x, update = (_empty(shape, dtype=torch.bfloat16) for _ in range(2))
    slots: Sequence[Tensor] = executor.kv_slots()

    def call() -> None:
        with patch.object(torch, "empty", _empty):
            hidden, added = x, update
            for layer, kv_cache, own in zip(model.layers, slots, inputs.attention, strict=True):
                hidden, added = layer(hidden, added, cos, sin, kv_cache, own)

    return call


def least_costs(call: Call, num_steps: int) -> dict[str, Cost]:
    """Returns the costs of each operation, and of the layers with all that is in them."""
    call()  # compiles
    least: dict[str, Cost] = {}
    layers = Cost(calls=LAYERS, seconds=float("inf"))
    for _ in range(num_steps):
        started = time.perf_counter()
        call()
        layers.seconds = min(layers.seconds, time.perf_counter() - started)
        clock = Clock()
        with clock.patched():
            call()
        for name, cost in clock.costs.items():
            kept = least.setdefault(name, cost)
            kept.seconds = min(kept.seconds, cost.seconds)
            kept.triton_s = min(kept.triton_s, cost.triton_s)
    layers.launches = sum(each.launches for each in least.values())
    layers.triton_s = sum(each.triton_s for each in least.values())
    return {**least, LAYER: layers}


if __name__ == "__main__":
    main()
