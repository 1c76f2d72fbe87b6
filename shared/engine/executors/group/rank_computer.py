"""One rank's part of a model on the CPU, and its part of the KV cache."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import structlog
import torch
from torch import Tensor

from kernels.device import IS_INTERPRETED
from kernels.ops import cpu_host
from shared.background import item_error
from shared.engine.executors.group.fingerprint import fingerprint, model_on_meta
from shared.engine.executors.group.kv.rank_memory import CopyThread, RankKvMemory
from shared.engine.executors.group.messages import RankSetup
from shared.engine.executors.loading.cpu_kernels import compile_kernels, compile_plan
from shared.engine.executors.loading.device_numerics import device_numerics
from shared.engine.executors.loading.kv_scales import read_kv_scales, set_kv_scales
from shared.engine.executors.loading.model_loading import finish_model, kv_layout_of, open_weights
from shared.engine.executors.loading.warm_up import idle_step
from shared.engine.executors.step_computer import StepComputer
from shared.engine.kv.kv_cache import allocate_kv_cache
from shared.engine.kv.kv_dtype import resolve_kv_dtype
from shared.engine.model_config.model_config import ModelConfig
from shared.engine.models.checkpoint_config import read_config
from shared.engine.models.device_step import DeviceStepOutput
from shared.engine.models.rank_decoder import RankDecoder
from shared.engine.models.rank_tensors import RankTensors
from shared.engine.models.weight_cuts import WeightCuts
from shared.engine.parallel.mesh import Mesh
from shared.engine.parallel.processes.rank_messages import RankIdentity
from shared.engine.parallel.rank_layout import kv_shards, rank_layout
from shared.engine.parallel.rank_part import RankPart, local_config
from shared.engine.planning.worker_parts import worker_parts
from shared.engine.step import StepInputs, StepOutput
from shared.engine.weights.load import load_weights
from shared.engine.weights.shared_weights import map_weights, weights_cache_dir
from shared.kv_layout import FP8, KvLayout, KvShard
from shared.kv_wire.shards import sent_shards
from shared.messages import TokenLogprobs

log = structlog.get_logger(__name__)

CPU = torch.device("cpu")


class RankComputer(StepComputer):
    """The ranks of a stage that do not answer compute their part of the logits, and sample nothing.
    A stage receives hidden states from the one before it and sends its own to the next.
    """

    def __init__(
        self, model: RankDecoder, kv_cache: Tensor, kv_layout: KvLayout, mesh: Mesh
    ) -> None:
        super().__init__(model, kv_cache, kv_layout)
        self._mesh = mesh
        stage, _ = mesh.shape.place(mesh.rank)
        self._is_first = stage == 0
        self._is_last = stage + 1 == mesh.shape.pp
        self._answers = mesh.rank == mesh.shape.answering_rank
        self.failure = ""  # failure of the last step

    @torch.inference_mode()
    def run(self, inputs: StepInputs) -> StepOutput:
        self.failure = ""
        if self._is_last:
            return super().run(inputs)
        self._mesh.send(self.hidden(inputs))
        return StepOutput([])

    def run_idle(self, query_lens: list[int], *, temperature: float) -> None:
        """A step without side effects."""
        layout = self.kv_layout
        self.run(
            idle_step(
                layout.block_size,
                query_lens,
                temperature=temperature,
                num_groups=len(layout.groups),
            )
        )

    def counted_experts(self) -> Tensor | None:
        """Returns the counts of this stage's layers and of all layers before. All ranks call it
        between the same steps.
        """
        found = self._counts_before(), super().counted_experts()
        parts = [each for each in found if each is not None]
        counts = torch.cat(parts) if parts else None
        if not self._is_last:
            self._mesh.send(torch.tensor((0, 0) if counts is None else counts.shape))
            if counts is not None:
                self._mesh.send(counts)
        return counts

    def _counts_before(self) -> Tensor | None:
        """Receives the counts of the stages before this one."""
        if self._is_first:
            return None
        shape = self._mesh.recv((2,), torch.int64).tolist()
        return self._mesh.recv(shape, torch.int64) if any(shape) else None

    def _entering(self, inputs: StepInputs) -> Tensor | None:
        if self._is_first:
            return None
        shape = len(inputs.input_ids), self.model.config.hidden_size
        return self._mesh.recv(shape, self.model.dtype)

    def _samples_on_device(self, inputs: StepInputs) -> bool:
        """Whether the device samples: if not, sampling follows the last exchange of ranks."""
        return self._answers and inputs.sampling.is_plain_greedy

    def _tokens(
        self, done: DeviceStepOutput, inputs: StepInputs, began_at: float
    ) -> tuple[list[int], list[TokenLogprobs | None], frozenset[int]]:
        if self._answers:
            return super()._tokens(done, inputs, began_at)
        return [], [], frozenset()

    def _check_routing(self, is_misrouted: bool) -> None:
        """Fails this step alone: the check follows the last exchange with other ranks."""
        try:
            super()._check_routing(is_misrouted)
        except FloatingPointError as error:
            self.failure = f"{type(error).__name__}: {error}"

    def _sample_logits(
        self, logits: Tensor, inputs: StepInputs, began_at: float
    ) -> tuple[list[int], list[TokenLogprobs | None], frozenset[int]]:
        """Samples after the last exchange with other ranks: an error fails this step alone."""
        try:
            return super()._sample_logits(logits, inputs, began_at)
        except BaseException as raised:
            error = item_error(raised)
            log.exception("sampling_failed")
            self.failure = f"{type(error).__name__}: {error}"
            return [], [], frozenset()


@dataclass(frozen=True)
class LoadedRank:
    """A loaded rank. It pushes the part `sent` of `memory`, see sent_shards."""

    computer: RankComputer
    identity: RankIdentity
    memory: RankKvMemory
    sent: KvShard


def load_rank(setup: RankSetup, mesh: Mesh) -> LoadedRank:
    """Raises CheckpointError, ConfigError."""
    options = setup.options
    config = read_config(Path(setup.model_dir))
    parts = worker_parts(config, mesh.shape, options.experts)
    part = parts[mesh.rank]
    stage, _ = mesh.shape.place(mesh.rank)
    local = local_config(config, part)
    kv_dtype = resolve_kv_dtype(options.kv_dtype, options.dtype, config, CPU)
    layout = kv_layout_of(config, kv_dtype, options.block_size)
    kv_layout = rank_layout(layout, part)
    if not IS_INTERPRETED:  # the plan determines the layout of packed weights
        compile_kernels(compile_plan(local, options.dtype, kv_layout, is_compressed=False))
    model = RankDecoder(
        config,
        part,
        [parts[rank].vocabulary for rank in mesh.shape.stage_ranks(stage)],
        mesh,
        dtype=getattr(torch, options.dtype),
        num_positions=options.context_tokens(config, setup.max_blocks),
    ).eval()
    checkpoint = _fill(model, config, part, setup, kv_dtype)
    numerics = device_numerics(
        CPU, options.dtype, options.mode, options.activations, kv_dtype=kv_dtype
    )
    identity = RankIdentity(
        weights_digest=checkpoint,
        layout_key=layout.key,
        numerics=str(numerics),
        versions=" ".join(f"{name} {version(name)}" for name in ("torch", "numpy")),
    )
    finish_model(model, options.mode, is_compressed=False)
    kv_cache = allocate_kv_cache(kv_layout, setup.max_blocks, CPU)
    computer = RankComputer(model, kv_cache, kv_layout, mesh)
    if not IS_INTERPRETED:
        _warm_up(computer)
    shards = kv_shards(parts)
    memory = RankKvMemory(CopyThread(computer, numerics), layout, shards[mesh.rank])
    return LoadedRank(computer, identity, memory, sent_shards(shards)[mesh.rank])


def _warm_up(computer: RankComputer) -> None:
    """Steps with enough rows for every kernel to use all threads. All ranks run them together, so
    none may hold the lock on compiled code, for which another one would wait.
    """
    rows = [cpu_host().few_rows + 1, 1]
    for temperature in (0.0, 1.0):
        computer.run_idle(rows, temperature=temperature)


def _fill(
    model: RankDecoder,
    config: ModelConfig,
    part: RankPart,
    setup: RankSetup,
    kv_dtype: str,
) -> str:
    """Reads the rank's parts of the weights, and no others. Returns a fingerprint of all.

    They lie packed in the host's cache, one file for each part: a second start maps it.
    """
    destinations = model.weight_destinations()
    options = setup.options
    whole = model_on_meta(config, options.dtype)
    with open_weights(Path(setup.model_dir), config, whole, options.load_format) as source:
        if kv_dtype == FP8:
            scales = read_kv_scales(source.tensors, config)
            set_kv_scales(model, scales[part.layers][:, :, part.kv_heads])
        own = RankTensors(source.tensors, WeightCuts(config, part), destinations.keys())

        def identity() -> str:
            return fingerprint(source.stored, source.described)

        if not IS_INTERPRETED:
            described = source.described + repr(part).encode()
            place = own, described, identity, weights_cache_dir()
            if (mapped := map_weights(model, destinations, *place)) is not None:
                return mapped
        load_weights(own, destinations)
        return identity()
