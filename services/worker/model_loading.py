"""Loads what a worker computes with: its model, and the vocabulary for grammars."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import structlog

from services.worker.rank_leader import listening_for_ranks
from shared.config import WorkerConfig
from shared.engine.executors.executor import Executor
from shared.engine.executors.loading.load_options import LoadOptions, OnPhase, ignore_phase
from shared.engine.parallel.mesh_shape import MeshShape
from shared.engine.parallel.processes.join import HostListener
from shared.engine.token_masks.mask_threads import MaskThreads
from shared.engine.token_masks.worker_grammars import WorkerGrammars
from shared.errors import CheckpointError
from shared.grammar.vocabulary import load_vocabulary
from shared.messages import Role
from shared.telemetry.stage_times import StageTimes
from shared.transport.bus import NatsBus

log = structlog.get_logger(__name__)


async def load_with_ranks(
    config: WorkerConfig, bus: NatsBus, load: Callable[..., Executor]
) -> Executor:
    async with listening_for_ranks(config, bus) as hosts:
        arguments = () if hosts is None else (hosts,)
        return await asyncio.to_thread(load, config, *arguments)


def load_model(
    config: WorkerConfig,
    hosts: HostListener | None = None,
    on_phase: OnPhase = ignore_phase,
    times: StageTimes | None = None,
) -> Executor:
    """Loads the model. `hosts` listens for ranks of other hosts. Raises CheckpointError,
    ConfigError.
    """
    with (times or StageTimes()).stage("torch"):  # other executors do not need it
        from shared.engine.executors.load import load_executor

    names = set(LoadOptions.__struct_fields__) & set(config.__struct_fields__)
    options: dict[str, Any] = {name: getattr(config, name) for name in names}
    options |= {"num_threads": config.num_threads or None, "has_row_kernels": True}
    if not config.has_ranks:
        return load_executor(config.model_dir, config.device, on_phase=on_phase, **options)
    from shared.engine.executors.group.load_group import load_group

    shape = MeshShape(config.tp, config.pp)
    return load_group(config.model_dir, config.device, shape, hosts, on_phase, **options)


def on_device(config: WorkerConfig, roles: tuple[Role, ...]) -> WorkerConfig:
    """Returns the config with the device resolved and its defaults. Raises ConfigError."""
    device = config.device
    if device == "auto":
        from shared.engine.executors.load import device_type  # imports torch

        device = device_type(device)
    return config.with_defaults_of(device, is_prefill_only="decode" not in roles)


def load_grammars(
    config: WorkerConfig, executor: Executor, roles: tuple[Role, ...]
) -> WorkerGrammars | None:
    """Returns None for a worker that samples no tokens, or whose vocabulary grammars cannot use."""
    if "decode" not in roles:
        return None
    try:
        vocabulary = load_vocabulary(
            config.model_dir, vocab_size=executor.vocab_size, eos_token_ids=executor.eos_token_ids
        )
    except CheckpointError as error:
        log.warning("grammars_unavailable", reason=error.message)
        return None
    return WorkerGrammars(vocabulary, MaskThreads())
