"""Loads a model on one CUDA device, stage by stage, and tells the time of each.

device, empty_model, staging ──▶ weights, digest, kernels_wait ──▶ finish, gemms, first_step,
                      └──▶ kernels, on a thread ──┘                last_kernels, kv_cache, graphs
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import structlog
import torch
from torch import Tensor

from shared.engine.codec.manifest import is_bundle
from shared.engine.executors.cuda.compile_kernels import StepKernels, compile_kernels
from shared.engine.executors.cuda.cuda_device import CudaDevice
from shared.engine.executors.cuda.cuda_graphs import CudaGraphs
from shared.engine.executors.cuda.decode_graphs import (
    GRAPH_BYTES,
    beside_graphs,
    max_graphs_in,
)
from shared.engine.executors.cuda.first_step import measure_gemms, run_largest_step
from shared.engine.executors.cuda.graph_computer import GraphComputer
from shared.engine.executors.cuda.libraries import set_libraries
from shared.engine.executors.cuda.meta_model import META
from shared.engine.executors.loading.device_limit import (
    DeviceLimit,
    out_of_memory,
    tried_bytes,
)
from shared.engine.executors.loading.kv_scales import load_kv_scales
from shared.engine.executors.loading.kv_sizing import MemoryReport, num_blocks_for, num_blocks_in
from shared.engine.executors.loading.load_options import LoadOptions, OnPhase
from shared.engine.executors.loading.model_loading import (
    OpenedWeights,
    empty_model,
    finish_model,
    kv_layout_of,
    open_weights,
    resolve_dtype,
    set_mode,
)
from shared.engine.kv.kv_cache import allocate_kv_cache
from shared.engine.kv.kv_dtype import resolve_kv_dtype
from shared.engine.model_config.model_config import ModelConfig
from shared.engine.models.checkpoint_config import read_config
from shared.engine.models.decoder import Decoder
from shared.engine.planning.vision_tensors import encoder_bytes
from shared.engine.weights.load import load_weights
from shared.engine.weights.reading.staging import (
    LocalStaging,
    WeightStaging,
    num_readers,
    pinned_ring,
)
from shared.engine.weights.shared_weights import compress_weights
from shared.engine.weights.weight_form import uses_compressed, weights_report
from shared.errors import ConfigError
from shared.kv_layout import ITEM_BYTES, KvLayout
from shared.telemetry.stage_times import StageTimes

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """`stages` are the fields of the log event: NAME_s, the seconds of each stage."""

    computer: GraphComputer
    num_blocks: int
    revision: str
    stages: Mapping[str, float]


def load_on_cuda(
    model_dir: Path,
    options: LoadOptions,
    device: CudaDevice,
    on_phase: OnPhase,
    times: StageTimes | None = None,
) -> LoadedModel:
    """Binds the calling thread. `times` has the stages before it. Raises as `CudaExecutor.load`."""
    times = StageTimes() if times is None else times
    with times.stage("device"):
        device.bind()
        device.check_kernels()  # reading the model, which follows, takes minutes
    loaded = _CudaLoad(model_dir, options, device, on_phase, times).run()
    log.info("loaded", **loaded.stages)
    return loaded


class _CudaLoad:
    """One load. Its methods are the stages; `run` calls them in order."""

    def __init__(
        self,
        model_dir: Path,
        options: LoadOptions,
        device: CudaDevice,
        on_phase: OnPhase,
        times: StageTimes,
    ) -> None:
        """Limits the memory that torch takes, if an option does. Raises CheckpointError,
        ConfigError.
        """
        self._model_dir, self._options, self._device = model_dir, options, device
        self._on_phase, self._stage, self._times = on_phase, times.stage, times
        self._target = target = device.tensors_on
        self._config = config = read_config(model_dir)
        self._is_compressed = uses_compressed(
            options.weights, model_dir, target, options.load_format
        )
        self._dtype = resolve_dtype(options.dtype, target)
        self._layout = _kv_layout(config, options, self._dtype, target)
        self._given_blocks = _given_blocks(options, self._layout)
        self._limit = self._limited() if options.gpu_memory else None

    def _limited(self) -> DeviceLimit:
        limit = DeviceLimit.of(self._options.gpu_memory, self._device.memory().total)
        self._device.limit_torch(limit.torch_bytes / limit.total)
        return limit

    def run(self) -> LoadedModel:
        try:
            return self._run()
        except torch.OutOfMemoryError as error:
            raise self._no_room(tried_bytes(str(error)), "the next part of a start") from None

    def _no_room(self, num_bytes: int, what: str) -> ConfigError:
        """Returns the error of a start that lacks memory for `what`."""
        return out_of_memory(self._device.memory(), self._limit, num_bytes, what)

    def _run(self) -> LoadedModel:
        with self._stage("empty_model"):
            model = self._empty_model()
        revision = self._read(model)
        with self._stage("finish"):
            self._finish(model)
        with self._stage("gemms"):
            measure_gemms(model)
            self._device.release_cached()
        computer = self._computer(model)
        set_libraries(model, self._layout, self._options, self._device)
        with self._stage("first_step"):
            run_largest_step(computer, self._options)
        num_blocks = self._num_blocks()
        with self._stage("last_kernels"):
            # of the weights' final forms, and for the strides of the whole cache
            kernels = StepKernels(model, self._layout, num_blocks, self._options)
            compile_kernels(kernels, self._device.bind)
        with self._stage("kv_cache"):
            num_held = 0 if self._options.is_parked else num_blocks
            computer.kv_cache = self._kv_cache(num_held)
        if self._has_graphs:
            with self._stage("graphs"):
                self._capture_graphs(computer)
        return LoadedModel(computer, num_blocks, revision, self._times.fields())

    @property
    def _has_graphs(self) -> bool:
        return has_graphs(self._config, self._options, self._target)

    @property
    def _is_read(self) -> bool:
        return self._options.load_format != "dummy"  # "dummy" reads no files

    def _empty_model(self) -> Decoder:
        try:
            return self._unset_model(self._target, META if self._is_compressed else self._target)
        except torch.OutOfMemoryError:
            self._device.release_cached()
        weights = weights_report(self._unset_model(META, META))
        raise self._no_room(weights.num_plain_bytes, "the model")

    def _unset_model(self, on: torch.device, weights_on: torch.device) -> Decoder:
        given, options = self._given_blocks, self._options
        ceiling = None if given is None else options.kv_ceiling(self._layout, given)
        return empty_model(
            self._model_dir,
            self._config,
            self._dtype,
            on,
            num_positions=options.context_tokens(self._config, ceiling),
            weights_on=weights_on,
        )

    def _read(self, model: Decoder) -> str:
        """Fills the model while kernels are compiled by their keys. Returns the revision."""
        with self._stage("staging"):
            staging = self._staging()
        with self._threads() as (readers, compiler), self._opened(model, staging, readers) as found:
            set_mode(model, self._options.mode)
            load_kv_scales(model, found.tensors, self._config, self._layout)
            compiled = self._begin_to_compile(model, compiler)
            with self._stage("weights"):
                self._fill(model, found, readers)
            with self._stage("digest"):
                revision = found.revision()
            staging.close()
            self._on_phase("compiling")
            if compiled is not None:
                with self._stage("kernels_wait"):
                    compiled.result()
        return revision

    def _staging(self) -> WeightStaging:
        """A bundle is decoded in memory of its own."""
        is_staged = self._is_read and not is_bundle(self._model_dir)
        return pinned_ring(self._target) if is_staged else LocalStaging()

    @contextmanager
    def _threads(self) -> Iterator[tuple[Executor, Executor]]:
        """Yields those that read, and one that compiles."""
        bind, num = self._device.bind, num_readers() if self._is_read else 1
        with (
            ThreadPoolExecutor(num, "read", initializer=bind) as readers,
            ThreadPoolExecutor(1, "compile", initializer=bind) as compiler,
        ):
            yield readers, compiler

    def _opened(
        self, model: Decoder, staging: WeightStaging, readers: Executor
    ) -> AbstractContextManager[OpenedWeights]:
        where = self._model_dir, self._config, model, self._options.load_format
        return open_weights(*where, staging=staging, readers=readers)

    def _begin_to_compile(self, model: Decoder, compiler: Executor) -> Future[None] | None:
        """Returns None for quantized weights: before `finish_model` their memory is no operand."""
        if self._config.is_quantized:
            return None
        kernels = StepKernels(model, self._layout, self._given_blocks or 1, self._options)
        return compiler.submit(self._compile, kernels)

    def _compile(self, kernels: StepKernels) -> None:
        with self._stage("kernels"):
            compile_kernels(kernels, self._device.bind)

    def _fill(self, model: Decoder, found: OpenedWeights, readers: Executor) -> None:
        destinations = model.weight_destinations()
        if self._is_compressed:
            compress_weights(model, destinations, found.tensors, self._target, readers)
        else:
            load_weights(found.tensors, destinations, readers)

    def _finish(self, model: Decoder) -> None:
        finish_model(
            model,
            self._options.mode,
            is_compressed=self._is_compressed,
            activations=self._options.activations,
        )

    def _computer(self, model: Decoder) -> GraphComputer:
        """Returns one with a single block, which is enough for the first step."""
        cache = allocate_kv_cache(self._layout, 1, self._target)
        check = self._device.check_bound
        return GraphComputer(model, cache, self._layout, check_thread=check)

    def _num_blocks(self) -> int:
        """Returns the given ones, or those in the memory that the first step has left. Raises
        ConfigError if they do not fit the limit, if there is one.
        """
        given, limit = self._given_blocks, self._limit
        if limit is None and given is not None:
            return given
        report = beside_encoder(self._device.memory(), self._config, self._dtype)
        if limit is None:
            left = beside_graphs(report) if self._has_graphs else report
            return num_blocks_in(left, self._layout)
        graph_bytes = self._max_graphs * GRAPH_BYTES if self._has_graphs else 0
        if given is None:
            return limit.num_blocks(report, graph_bytes, self._layout)
        limit.check_kv(given, report, graph_bytes, self._layout)
        return given

    def _kv_cache(self, num_blocks: int) -> Tensor:
        try:
            return allocate_kv_cache(self._layout, num_blocks, self._target)
        except torch.OutOfMemoryError:
            num_bytes = num_blocks * self._layout.block_bytes
            raise self._no_room(num_bytes, "the KV cache") from None

    @property
    def _max_graphs(self) -> int:
        limit = self._limit
        return max_graphs_in(self._device.memory().total if limit is None else limit.num_bytes)

    def _capture_graphs(self, computer: GraphComputer) -> None:
        options, most = self._options, self._max_graphs
        max_rows = min(options.max_sequences, options.max_batch_tokens)
        computer.use_graphs(CudaGraphs(self._target), max_rows=max_rows, max_graphs=most)


def beside_encoder(report: MemoryReport, config: ModelConfig, dtype: str) -> MemoryReport:
    """Returns the report as if the encoder of images were loaded, which the worker does next."""
    num_bytes = encoder_bytes(config.vision, ITEM_BYTES[dtype])
    return replace(report, free=report.free - num_bytes, reserved=report.reserved + num_bytes)


def has_graphs(config: ModelConfig, options: LoadOptions, target: torch.device) -> bool:
    """Whether decode steps are captured. A model without a head has none, and its embeddings are
    answered soonest with one step in flight.
    """
    return config.has_head and options.executor == "auto" and target.type == "cuda"


def _kv_layout(
    config: ModelConfig, options: LoadOptions, dtype: str, target: torch.device
) -> KvLayout:
    kv_dtype = resolve_kv_dtype(options.kv_dtype, dtype, config, target)
    return kv_layout_of(config, kv_dtype, options.block_size)


def _given_blocks(options: LoadOptions, layout: KvLayout) -> int | None:
    """Returns the blocks of the given size, or None if the memory gives it. Raises ConfigError."""
    if options.kv_cache_bytes is not None:
        return num_blocks_for(layout, options.kv_cache_bytes)
    if options.is_parked and not options.gpu_memory:
        raise ConfigError(
            "a worker that starts parked needs kv_cache_bytes or gpu_memory: what is free at its "
            "start is not what it gets later",
            param="kv_cache_bytes",
        )
    return None
