"""The runner that computes with a model: `Runner` over torch.

Steps run on a thread of their own; copies in and out of the cache on a second one, so that a push
of KV does not wait for a step, nor a step for a push.
"""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import numba
import numpy as np
import structlog
import torch
from torch import Tensor

from kernels.cpu.attention.vector_attention import SEGMENT
from kernels.cpu.compile import compile_lock
from kernels.cpu.layer.fused_layer import MANY_ROWS
from kernels.cpu.simd.intrinsics import FEW_ROWS
from kernels.device import IS_INTERPRETED
from kernels.ops import copy_blocks, gather_blocks, has_custom_gemm, scatter_blocks
from shared.clock import Clock, MonotonicClock
from shared.engine.kv_cache import allocate_kv_cache, num_blocks_for
from shared.engine.layers.attention import Attention
from shared.engine.layers.attention_inputs import build_attention_inputs
from shared.engine.layers.embedding import OutputHead
from shared.engine.layers.linear import Linear
from shared.engine.model_config import ModelConfig
from shared.engine.models.checkpoint_config import read_config
from shared.engine.models.decoder import Decoder
from shared.engine.runner import SamplingInputs, StepInputs, StepOutput
from shared.engine.runners.step_deadline import StepBudget
from shared.engine.runners.step_threads import StepThreads
from shared.engine.sampling.hidden_state_outputs import pooled, prompt_logprobs
from shared.engine.sampling.sampler import sample_tokens
from shared.engine.weights.load import (
    CheckpointTensors,
    load_weights,
    open_checkpoint,
    weights_digest,
)
from shared.engine.weights.multimodal_checkpoint import TextTensors
from shared.engine.weights.shared_weights import (
    compress_in_place,
    compress_weights,
    map_weights,
    weights_cache_dir,
)
from shared.engine.weights.weight_form import WeightsReport, wants_compressed, weights_report
from shared.errors import CheckpointError, ConfigError
from shared.kv_format import KvFormat
from shared.messages import TokenLogprobs

log = structlog.get_logger(__name__)

# malloc.h: M_TRIM_THRESHOLD, and M_MMAP_THRESHOLD at the most that glibc takes
_MALLOPT = {-1: 256 << 20, -3: 32 << 20}
DTYPES = ("bfloat16", "float32", "float16")
DEFAULT_KV_CACHE_BYTES = 1 << 30


def resolve_dtype(dtype: str, device: torch.device) -> str:
    """'auto' is BF16 where the hardware multiplies it natively, else FP32. Raises ConfigError."""
    if dtype == "auto":
        if device.type == "cuda":
            return "bfloat16"
        capabilities = torch.cpu.get_capabilities()
        has_bf16 = capabilities.get("avx512_bf16") or capabilities.get("amx_bf16")
        return "bfloat16" if has_bf16 else "float32"
    if dtype not in DTYPES:
        raise ConfigError(f"dtype {dtype!r} is none of auto, {', '.join(DTYPES)}", param="dtype")
    return dtype


def _idle_step(block_size: int, num_rows: int) -> StepInputs:
    """A prefill of so many tokens and a decode that leave the cache as it is."""
    return StepInputs(
        input_ids=np.zeros(num_rows + 1, dtype=np.int64),
        positions=np.zeros(num_rows + 1, dtype=np.int64),
        slot_mapping=np.full(num_rows + 1, -1, dtype=np.int64),
        query_lens=np.array([num_rows, 1], dtype=np.int64),
        context_lens=np.array([num_rows, 1], dtype=np.int64),
        block_tables=np.zeros((2, -(-num_rows // block_size)), dtype=np.int64),
        sampling=SamplingInputs(
            logits_indices=np.array([num_rows - 1, num_rows], dtype=np.int64),
            temperature=np.zeros(2, dtype=np.float32),
            top_k=np.zeros(2, dtype=np.int64),
            top_p=np.ones(2, dtype=np.float32),
            min_p=np.zeros(2, dtype=np.float32),
            seed=np.zeros(2, dtype=np.uint64),
            choice_index=np.zeros(2, dtype=np.int64),
            output_position=np.zeros(2, dtype=np.int64),
        ),
    )


class ModelRunner:
    """Construct with `load`. `revision` is a digest of config and weights."""

    def __init__(
        self,
        model: Decoder,
        kv_cache: Tensor,
        kv_format: KvFormat,
        *,
        model_name: str,
        revision: str,
        num_threads: int | None,
        clock: Clock,
    ) -> None:
        config = model.config
        self.model_name = model_name
        self.revision = revision
        self.kv_format = kv_format
        self.num_blocks = kv_cache.shape[2]
        self.max_context_tokens = model.cos.shape[0]
        self.vocab_size = config.vocab_size
        self.eos_token_ids = config.eos_token_ids
        self.attention_span = _attention_span(config)
        self._model = model
        self._kv_cache = kv_cache
        self._device = kv_cache.device
        self._budget = StepBudget()
        self._threads = StepThreads(
            num_threads or torch.get_num_threads(),
            _num_weights(model),
            kv_cache.dtype,
            has_custom_gemm=all(has_custom_gemm(each.weight) for each in _products(model)),
        )
        self._clock = clock
        self._step_thread = ThreadPoolExecutor(1, "engine-step", initializer=_keep_freed_memory)
        self._copy_thread = ThreadPoolExecutor(1, "engine-copy")

    @classmethod
    def load(
        cls,
        model_dir: Path | str,
        *,
        dtype: str = "auto",
        block_size: int = 16,
        kv_cache_bytes: int = DEFAULT_KV_CACHE_BYTES,
        device: str = "cpu",
        num_threads: int | None = None,
        is_batch_invariant: bool = True,
        weights: str = "auto",
        model_name: str | None = None,
        clock: Clock | None = None,
    ) -> ModelRunner:
        """Raises CheckpointError for a bad checkpoint, ConfigError for a bad option.

        `is_batch_invariant`: a token's bits depend neither on its batch nor on chunking, so that a
        resumed answer goes on as it would have. On the CPU they never do, and it costs nothing.
        `weights`: see weight_form.py; where tokens are batch-invariant they have the same bits.
        """
        model_dir = Path(model_dir)
        config = read_config(model_dir)
        target = _device(device)
        is_compressed = wants_compressed(weights, model_dir, target)
        kv_format = _kv_format(config, resolve_dtype(dtype, target), block_size)
        num_blocks = num_blocks_for(kv_format, kv_cache_bytes)
        try:
            model = Decoder(
                config,
                dtype=getattr(torch, kv_format.dtype),
                num_positions=min(config.max_position_embeddings, num_blocks * block_size),
            )
        except (RuntimeError, MemoryError) as error:  # torch's, for more memory than there is
            reason = str(error).partition("\n")[0]
            raise CheckpointError(f"{model_dir}: too large for this machine: {reason}") from None
        with open_checkpoint(model_dir) as tensors:
            revision = _fill(model, tensors, config, target, is_compressed=is_compressed)
        model.to(target).eval()
        if is_compressed:
            if not _shares_weights(target):
                compress_in_place(model, model.weight_destinations())
            log.info("weights_compressed", **msgspec.structs.asdict(weights_report(model)))
        _pack(model)
        model.fuse()
        _set_batch_invariance(model, is_batch_invariant)
        runner = cls(
            model,
            allocate_kv_cache(kv_format, num_blocks, target),
            kv_format,
            model_name=model_dir.resolve().name if model_name is None else model_name,
            revision=revision,
            num_threads=num_threads,
            clock=MonotonicClock() if clock is None else clock,
        )
        with compile_lock():
            runner._warm_up()  # whoever is ready has its kernels compiled
        return runner

    @property
    def weights(self) -> WeightsReport:
        return weights_report(self._model)

    def step_budget_s(self, inputs: StepInputs) -> float:
        return self._budget.seconds(inputs)

    async def run(self, inputs: StepInputs) -> StepOutput:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._step_thread, self._run, inputs)

    async def read_kv(
        self, block_table: Sequence[int], first_token: int, num_tokens: int, out: memoryview
    ) -> None:
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(
            self._copy_thread, self._read_kv, block_table, first_token, num_tokens, out
        )

    async def write_kv(
        self, block_table: Sequence[int], first_token: int, num_tokens: int, payload: memoryview
    ) -> None:
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(
            self._copy_thread, self._write_kv, block_table, first_token, num_tokens, payload
        )

    async def zero_blocks(self, block_ids: list[int]) -> None:
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._step_thread, self._zero_blocks, block_ids)

    async def close(self) -> None:
        """Waits for the step and the copies under way."""
        loop = asyncio.get_running_loop()
        for executor in (self._step_thread, self._copy_thread):
            await loop.run_in_executor(None, executor.shutdown)

    @torch.inference_mode()
    def _warm_up(self) -> None:
        """With as many rows as any kernel asks for to run on all threads, or on rows of its own."""
        block_size, num_threads = self.kv_format.block_size, numba.get_num_threads()
        hidden = self._hidden(_idle_step(block_size, FEW_ROWS + 1))
        self._model.logits(hidden[:1])
        self._model.argmax_tokens(hidden[:1])
        numba.set_num_threads(1)
        self._hidden(_idle_step(block_size, MANY_ROWS))
        numba.set_num_threads(num_threads)

    @torch.inference_mode()
    def step_logits(self, inputs: StepInputs) -> Tensor:
        """Computes a step on the calling thread. Returns [R, vocab_size] FP32."""
        return self._model.logits(self._sampled(self._hidden(inputs), inputs))

    def _sample(
        self, hidden: Tensor, inputs: StepInputs
    ) -> tuple[list[int], list[TokenLogprobs | None]]:
        if not inputs.sampling.num_rows:
            return [], []
        sampled = self._sampled(hidden, inputs)
        if inputs.sampling.is_plain_greedy:
            return self._model.argmax_tokens(sampled).tolist(), []
        return sample_tokens(self._model.logits(sampled), inputs.sampling)

    def _sampled(self, hidden: Tensor, inputs: StepInputs) -> Tensor:
        """The rows that a token is drawn from."""
        rows = torch.from_numpy(inputs.sampling.logits_indices).to(self._device)
        return hidden.index_select(0, rows)

    def _hidden(self, inputs: StepInputs) -> Tensor:
        """Of all tokens, before the final norm. [T, hidden_size]"""
        if inputs.block_copies:
            copies = torch.tensor(inputs.block_copies).T.contiguous()  # [2, N]
            copy_blocks(self._kv_cache, *copies.to(self._device))
        return self._model(
            torch.from_numpy(inputs.input_ids).to(self._device),
            torch.from_numpy(inputs.positions).to(self._device),
            self._kv_cache,
            build_attention_inputs(inputs, self._device),
        )

    @torch.inference_mode()
    def _run(self, inputs: StepInputs) -> StepOutput:
        self._threads.set_for(len(inputs.input_ids))
        started = self._clock.now()
        hidden = self._hidden(inputs)
        token_ids, logprobs = self._sample(hidden, inputs)
        output = StepOutput(
            token_ids,
            logprobs,
            prompt_logprobs(hidden, inputs, self._model.logits, vocab_size=self.vocab_size),
            pooled(hidden, inputs, self._model.norm),
        )
        self._budget.observe(inputs, self._clock.now() - started)
        return output

    @torch.inference_mode()
    def _read_kv(
        self, block_table: Sequence[int], first_token: int, num_tokens: int, out: memoryview
    ) -> None:
        if num_tokens == 0:
            return
        self._check_run(block_table, first_token, num_tokens, out.nbytes)
        table = torch.tensor(block_table, device=self._device)
        shape = self._wire_shape(num_tokens)
        wire = torch.frombuffer(out, dtype=torch.uint8).view(self._kv_cache.dtype).view(shape)
        if self._device.type == "cpu":
            gather_blocks(self._kv_cache, table, first_token, num_tokens, wire)
        else:
            staged = torch.empty(shape, dtype=wire.dtype, device=self._device)
            gather_blocks(self._kv_cache, table, first_token, num_tokens, staged)
            wire.copy_(staged)

    @torch.inference_mode()
    def _write_kv(
        self, block_table: Sequence[int], first_token: int, num_tokens: int, payload: memoryview
    ) -> None:
        if num_tokens == 0:
            return
        self._check_run(block_table, first_token, num_tokens, payload.nbytes)
        wire = torch.empty(self._wire_shape(num_tokens), dtype=self._kv_cache.dtype)
        # A copy, because torch takes no read-only memory.
        np.copyto(wire.view(-1).view(torch.uint8).numpy(), np.frombuffer(payload, dtype=np.uint8))
        table = torch.tensor(block_table, device=self._device)
        scatter_blocks(self._kv_cache, table, first_token, num_tokens, wire.to(self._device))

    @torch.inference_mode()
    def _zero_blocks(self, block_ids: list[int]) -> None:
        self._kv_cache.index_fill_(2, torch.tensor(block_ids, device=self._device), 0)

    def _wire_shape(self, num_tokens: int) -> tuple[int, ...]:
        kv_format = self.kv_format
        return (kv_format.num_layers, 2, num_tokens, kv_format.num_kv_heads, kv_format.head_dim)

    def _check_run(
        self, block_table: Sequence[int], first_token: int, num_tokens: int, num_bytes: int
    ) -> None:
        if (
            first_token < 0
            or first_token + num_tokens > len(block_table) * self.kv_format.block_size
        ):
            raise ValueError(
                f"tokens [{first_token}, {first_token + num_tokens}) lie outside of "
                f"{len(block_table)} blocks of {self.kv_format.block_size}"
            )
        if num_bytes != num_tokens * self.kv_format.bytes_per_token:
            raise ValueError(
                f"{num_bytes} bytes are not {num_tokens} tokens of {self.kv_format.key}"
            )


def _pack(model: Decoder) -> None:
    for module in _products(model):
        module.pack()


def _num_weights(model: Decoder) -> int:
    """Of the products that every token takes part in."""
    return sum(each.weight.numel() for each in _products(model))


def _products(model: Decoder) -> Iterator[Linear | OutputHead]:
    return (each for each in model.modules() if isinstance(each, Linear | OutputHead))


def _set_batch_invariance(model: Decoder, is_batch_invariant: bool) -> None:
    for module in model.modules():
        if isinstance(module, Linear | OutputHead | Attention):
            module.is_batch_invariant = is_batch_invariant


def _fill(
    model: Decoder,
    tensors: CheckpointTensors,
    config: ModelConfig,
    device: torch.device,
    *,
    is_compressed: bool,
) -> str:
    """Returns the revision. On the CPU the processes of a host share one copy where they can."""
    read = TextTensors(tensors) if config.is_text_part else tensors
    destinations, described = model.weight_destinations(), msgspec.json.encode(config)

    def revision() -> str:
        return weights_digest(tensors, described)

    if _shares_weights(device):
        mapped = map_weights(
            model,
            destinations,
            read,
            described,
            revision,
            weights_cache_dir(),
            is_compressed=is_compressed,
        )
        if mapped is not None:
            return mapped
        if is_compressed:
            compress_weights(model, destinations, read)
            return revision()
    load_weights(read, destinations)
    return revision()


def _shares_weights(device: torch.device) -> bool:
    return device.type == "cpu" and not IS_INTERPRETED


def _attention_span(config: ModelConfig) -> int | None:
    """As far as the widest window, if all layers have one, and the segment that it begins in."""
    windows = [layer.window for layer in config.layers if layer.window is not None]
    return max(windows) + SEGMENT - 1 if len(windows) == config.num_layers else None


def _device(name: str) -> torch.device:
    """Raises ConfigError for one that is not there."""
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:  # the latter: a torch built without CUDA
        reason = str(error).partition("\n")[0]
        raise ConfigError(f"device {name!r} cannot be used: {reason}", param="device") from None


def _kv_format(config: ModelConfig, dtype: str, block_size: int) -> KvFormat:
    if block_size < 1:
        raise ConfigError(f"block_size {block_size} must be positive", param="block_size")
    return KvFormat(dtype, block_size, config.num_layers, config.num_kv_heads, config.head_dim)


def _keep_freed_memory() -> None:
    """Tells glibc to keep what a step frees for the next one.

    By default it hands buffers of some MiB back to the kernel each time, and their page faults cost
    more than the arithmetic on them. Other C libraries have no mallopt and are left alone.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for parameter, num_bytes in _MALLOPT.items():
            mallopt(parameter, num_bytes)
