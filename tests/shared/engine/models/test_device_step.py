"""A step on the device: it waits for nothing there, and gives the tokens of the host's sampler."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import numpy as np
import pytest
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.gpu_kit.model_steps.waits import first_wait
from kernels.device import IS_INTERPRETED
from shared.engine.executors.load import load_executor
from shared.engine.executors.loading.model_loading import finish_model, kv_layout_of, set_mode
from shared.engine.executors.loading.warm_up import idle_step
from shared.engine.executors.step_computer import StepComputer
from shared.engine.kv.kv_cache import allocate_kv_cache
from shared.engine.models.checkpoint_config import read_config
from shared.engine.models.decoder import Decoder
from shared.engine.models.device_step import device_step
from shared.engine.step import sampling_rows
from tests.support.engine.checkpoints import write_llama
from tests.support.engine.families import FAMILIES, SHAPE
from tests.support.engine.quantized import packed_config
from tests.support.engine.steps import Blocks, step_of

CPU = torch.device("cpu")
DENSE = ("llama, yarn", "qwen2", "qwen3", "gemma2", "gemma3", "llama4", "phi3, longrope")
ROUTED = ("qwen3 moe", "deepseek", "llama4, experts")
BATCHES: tuple[dict[str, Any], ...] = (
    {"query_lens": [1, 1, 1], "context_tokens": 100},
    {"query_lens": [1, 1], "temperature": 0.7},
    {"query_lens": [1, 5, 7]},
)
INT4 = packed_config(group_size=8)


@pytest.fixture
def launched() -> Iterator[list[str]]:
    """Tensors are on the CPU and take the branches of CUDA; launches are listed, not made."""
    pytest.importorskip("triton")
    if IS_INTERPRETED:
        pytest.skip("the interpreter launches nothing")
    from triton.runtime.jit import JITFunction

    from benchmarks.gpu_kit.dry.dry_device import NoProducts
    from tests.support.kernels.triton_ops import triton_ops

    names: list[str] = []

    def launch(self: JITFunction, *args: object, **kwargs: object) -> None:  # type: ignore[type-arg]
        names.append(self.fn.__name__)

    with ExitStack() as stack:
        stack.enter_context(triton_ops())
        stack.enter_context(patch.object(JITFunction, "run", launch))
        stack.enter_context(NoProducts())  # of which CPUs have not all
        for name, is_true in (("is_cuda", True), ("is_cpu", False)):
            stack.enter_context(patch.object(torch.Tensor, name, is_true, create=True))
        yield names


def computer_of(folder: Path, family: str, **options: Any) -> StepComputer:
    """Of an unset model, which computes garbage."""
    found = FAMILIES[family]
    fields = {"vocab_size": 199, "pad_token_id": 0, "eos_token_id": 2, **SHAPE, **found.fields}
    config_class = getattr(transformers, found.architecture).config_class
    config_class(architectures=[found.architecture], **fields, **options).save_pretrained(folder)
    config = read_config(folder)
    kv_layout = kv_layout_of(config, "bfloat16", 16)
    model = Decoder(config, dtype=torch.bfloat16, num_positions=512).eval()
    finish_model(model, "exact", is_compressed=False)
    return StepComputer(model, allocate_kv_cache(kv_layout, 8, CPU), kv_layout)


def step_function(computer: StepComputer, **batch: Any) -> Callable[[], object]:
    step = idle_step(16, num_groups=len(computer.kv_layout.groups), **batch)
    inputs, slots = computer.device_inputs(step, samples_on_device=True), computer.kv_slots()
    return lambda: device_step(computer.model, slots, inputs)


@pytest.mark.parametrize("family", [*DENSE, *ROUTED])
def test_step_waits_for_nothing(family: str, launched: list[str], tmp_path: Path) -> None:
    computer = computer_of(tmp_path, family)
    for mode in ("exact", "fast"):
        set_mode(computer.model, mode)
        for batch in BATCHES:
            function = step_function(computer, **batch)
            function()  # constants are copied to the device once
            launched.clear()
            assert first_wait(function) is None
            assert "_decode_attention_kernel" in launched


class Reads(TorchDispatchMode):
    """Notes each value that is read from the device one by one."""

    def __init__(self, events: list[str]) -> None:
        super().__init__()
        self.events = events

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            self.events.append("read")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("samples_on_device", [True, False])
def test_routers_are_checked_after_tokens_are_read(samples_on_device: bool, tmp_path: Path) -> None:
    """Nothing waits for the flags: they come with the tokens, or are read after them."""
    computer = computer_of(tmp_path, "qwen3 moe")
    step, events = idle_step(16, [1, 1]), list[str]()
    operands = (
        computer.model,
        computer.kv_slots(),
        computer.device_inputs(step, samples_on_device=samples_on_device),
    )
    hidden = torch.zeros(2, SHAPE["hidden_size"], dtype=torch.bfloat16)
    hidden[1, 3] = torch.nan
    with patch("shared.engine.models.device_step.hidden_states", lambda *_: hidden):
        done = device_step(*operands)
    sampling = patch.object(computer, "_sample_logits", lambda *_: events.append("tokens"))
    with sampling, Reads(events), pytest.raises(FloatingPointError, match="router's logits"):
        computer._tokens(done, step, 0.0)
    assert events == ([] if samples_on_device else ["tokens", "read"])


def test_wait_of_quantized_experts_is_named(launched: list[str], tmp_path: Path) -> None:
    computer = computer_of(tmp_path, "qwen3 moe", quantization_config=INT4)
    found = first_wait(step_function(computer, query_lens=[1, 1]))
    assert found is not None
    assert found.startswith("Tensor.tolist in shared/engine/layers/methods/expert_method.py:")


X = torch.arange(4)
WAITS: dict[str, Callable[[], object]] = {
    "aten._local_scalar_dense.default": lambda: int(X[1]),
    "aten.nonzero.default": lambda: X.nonzero(),
    "aten.index.Tensor": lambda: X[X > 1],
    "aten.index_put_.default": lambda: X.clone().index_put_((X > 1,), X[0]),
    "aten.lift_fresh.default": lambda: torch.tensor([1]),
    "aten._to_copy.default": lambda: X.to("meta"),
    "Tensor.tolist": lambda: X.tolist(),
    "Tensor.numpy": lambda: X.numpy(),
}


@pytest.mark.parametrize("operation", WAITS)
def test_waits_are_found(operation: str) -> None:
    assert first_wait(WAITS[operation]) == f"{operation} in no line of the engine"


def test_indexing_by_numbers_is_no_wait() -> None:
    assert first_wait(lambda: X[X].add_(X[1:2]).to(torch.float32)) is None


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_tokens_of_the_device_are_those_of_the_host(temperature: float, tmp_path: Path) -> None:
    """The host draws where logprobs are requested; the device, in a step without options."""
    write_llama(tmp_path)
    computer = load_executor(tmp_path, kv_cache_bytes=1 << 20).computer
    step = step_of([(Blocks(8).line(range(5, 45)), 40)])
    rows = sampling_rows(40, temperature=temperature, seed=np.arange(40))
    sampling = msgspec.structs.replace(step.sampling, rows=rows)
    plain = msgspec.structs.replace(step, sampling=sampling)
    with_logprobs = msgspec.structs.replace(sampling, raw_logprobs={0: 1})
    drawn = device_step(
        computer.model, computer.kv_slots(), computer.device_inputs(plain, samples_on_device=True)
    ).token_ids
    assert drawn is not None
    by_host = computer.run(msgspec.structs.replace(step, sampling=with_logprobs)).token_ids
    assert computer.run(plain).token_ids == drawn.tolist() == by_host
