"""One rank's part of a model on the CPU, and its part of the KV cache."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import torch
from torch import Tensor

from kernels.device import IS_INTERPRETED
from kernels.ops import cpu_host
from shared.engine.kv_cache import allocate_kv_cache
from shared.engine.model_config import ModelConfig
from shared.engine.models.checkpoint_config import read_config
from shared.engine.models.rank_decoder import RankDecoder
from shared.engine.models.weight_cuts import WeightCuts
from shared.engine.parallel.mesh import Mesh
from shared.engine.parallel.planning.rank_layout import rank_layout
from shared.engine.parallel.planning.rank_part import RankPart, local_config
from shared.engine.parallel.planning.worker_parts import worker_parts
from shared.engine.parallel.processes.rank_messages import RankIdentity
from shared.engine.ranks.fingerprint import fingerprint, model_on_meta
from shared.engine.ranks.messages import RankSetup
from shared.engine.runner import StepInputs, StepOutput
from shared.engine.runners.cpu_kernels import compile_kernels, compile_plan
from shared.engine.runners.device_numerics import device_numerics
from shared.engine.runners.model_loading import finish_model, kv_layout_of, open_weights
from shared.engine.runners.model_runner import ModelExecutor
from shared.engine.runners.warm_up import idle_step
from shared.kv_layout import KvLayout
from shared.messages import TokenLogprobs

CPU = torch.device("cpu")


class RankExecutor(ModelExecutor):
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

    @torch.inference_mode()
    def run(self, inputs: StepInputs) -> StepOutput:
        if self._is_last:
            return super().run(inputs)
        self._mesh.send(self.hidden(inputs))
        return StepOutput([])

    def _embedded(self, inputs: StepInputs) -> Tensor:
        if self._is_first:
            return super()._embedded(inputs)
        shape = len(inputs.input_ids), self.model.config.hidden_size
        return self._mesh.recv(shape, self.kv_cache.dtype)

    def _sample(
        self, hidden: Tensor, inputs: StepInputs, began_at: float
    ) -> tuple[list[int], list[TokenLogprobs | None], frozenset[int]]:
        if self._answers:
            return super()._sample(hidden, inputs, began_at)
        if inputs.sampling.num_rows:
            self.model.logits(self._sampled(hidden, inputs))
        return [], [], frozenset()


def load_rank(setup: RankSetup, mesh: Mesh) -> tuple[RankExecutor, RankIdentity]:
    """Raises CheckpointError, ConfigError."""
    model_dir = Path(setup.model_dir)
    config = read_config(model_dir)
    parts = worker_parts(config, mesh.shape)
    part = parts[mesh.rank]
    stage, _ = mesh.shape.place(mesh.rank)
    local = local_config(config, part)
    layout = kv_layout_of(config, setup.dtype, setup.block_size)
    kv_layout = rank_layout(layout, part)
    if not IS_INTERPRETED:  # before weights are packed: the plan determines their layout
        compile_kernels(compile_plan(local, kv_layout, is_compressed=False))
    model = RankDecoder(
        config,
        part,
        [parts[rank].vocabulary for rank in mesh.shape.stage_ranks(stage)],
        mesh,
        dtype=getattr(torch, setup.dtype),
        num_positions=min(config.max_position_embeddings, setup.num_blocks * setup.block_size),
    ).eval()
    checkpoint = _fill(model, config, part, model_dir, setup)
    identity = RankIdentity(
        weights_digest=checkpoint,
        layout_key=layout.key,
        numerics=str(device_numerics(CPU, setup.dtype, setup.mode, setup.activations)),
        versions=" ".join(f"{name} {version(name)}" for name in ("torch", "numpy")),
    )
    finish_model(model, setup.mode, is_compressed=False)
    kv_cache = allocate_kv_cache(kv_layout, setup.num_blocks, CPU)
    executor = RankExecutor(model, kv_cache, kv_layout, mesh)
    if not IS_INTERPRETED:
        _warm_up(executor)
    return executor, identity


def _warm_up(executor: RankExecutor) -> None:
    """Steps with enough rows for every kernel to use all threads. All ranks run them together, so
    none may hold the lock on compiled code, for which another one would wait.
    """
    rows = [cpu_host().few_rows + 1, 1]
    for temperature in (0.0, 1.0):
        executor.run(idle_step(executor.kv_layout.block_size, rows, temperature=temperature))


def _fill(
    model: RankDecoder, config: ModelConfig, part: RankPart, model_dir: Path, setup: RankSetup
) -> str:
    """Reads the rank's parts of the weights, and no others. Returns a fingerprint of all."""
    cuts = WeightCuts(config, part)
    whole = model_on_meta(config, setup.dtype)
    with open_weights(model_dir, config, whole, setup.load_format) as source:
        for name, destination in model.weight_destinations().items():
            source.tensors.read_into(name, cuts.of(name), destination)
        return fingerprint(source.tensors, source.described)
