"""Starts the ranks of a worker and returns their executor once all are ready."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import torch

from shared.clock import MonotonicClock
from shared.engine.executors.cpu_executor import DEFAULT_KV_CACHE_BYTES
from shared.engine.executors.group.fingerprint import model_on_meta
from shared.engine.executors.group.group_executor import GroupExecutor
from shared.engine.executors.group.group_steps import GroupSteps
from shared.engine.executors.group.joined_hosts import JoinedHosts, RankChannels
from shared.engine.executors.group.kv.rank_links import RankLinks
from shared.engine.executors.group.link_report import report_links
from shared.engine.executors.group.load_cuda_rank import load_cuda_rank
from shared.engine.executors.group.messages import GroupModel, RankSetup
from shared.engine.executors.group.start_group import LOAD_TIMEOUT_S, group_spec, start_group
from shared.engine.executors.load import device_type, refuse_gpu_memory, resolve_device
from shared.engine.executors.loading.device_numerics import device_numerics
from shared.engine.executors.loading.kv_sizing import num_blocks_for
from shared.engine.executors.loading.load_options import LoadOptions, OnPhase, ignore_phase
from shared.engine.executors.loading.mode_choice import resolve_mode
from shared.engine.executors.loading.model_loading import (
    kv_layout_of,
    open_weights,
    resolve_dtype,
)
from shared.engine.kv.kv_dtype import resolve_kv_dtype
from shared.engine.models.checkpoint_config import read_config
from shared.engine.models.weight_cuts import WeightCuts
from shared.engine.parallel.mesh_shape import MeshShape
from shared.engine.parallel.processes.join import HostListener
from shared.engine.parallel.processes.watchdog import GroupLost
from shared.engine.parallel.rank_layout import kv_shards
from shared.engine.planning.step_work import model_work
from shared.engine.planning.worker_parts import worker_parts
from shared.engine.weights.load import matched_names
from shared.errors import CheckpointError, ConfigError
from shared.kv_layout import ITEM_BYTES

CPU = torch.device("cpu")


def load_group(
    model_dir: Path | str,
    device: str,
    shape: MeshShape,
    hosts: HostListener | None = None,
    on_phase: OnPhase = ignore_phase,
    **given_options: Any,
) -> GroupExecutor:
    """Starts a group of ranks on the CPU, or one rank on a CUDA device. `given_options` are the
    fields of `LoadOptions`; `hosts` listens for the last ranks. Ranks on the CPU report no phase to
    `on_phase`. Raises CheckpointError for a bad checkpoint, or one that ranks see differently, and
    ConfigError for a model that cannot be cut like this.
    """
    model_dir = Path(model_dir)
    if device_type(device) == "cuda":
        if shape.num_ranks > 1:
            raise ConfigError(
                f"{shape.num_ranks} ranks on {device}: several ranks compute on the CPU so far",
                param="tp",
            )
        return load_cuda_rank(model_dir, device, on_phase=on_phase, **given_options)
    resolve_device(device)  # raises for any other
    options = LoadOptions(**given_options)
    refuse_gpu_memory(options)
    config = read_config(model_dir)
    parts = worker_parts(config, shape, options.experts)
    if options.weights == "compressed":
        raise ConfigError("compressed weights are not cut for ranks yet", param="weights")
    dtype = resolve_dtype(options.dtype, CPU)
    kv_dtype = resolve_kv_dtype(options.kv_dtype, dtype, config, CPU)
    kv_layout = kv_layout_of(config, kv_dtype, options.block_size)
    given = options.kv_cache_bytes
    num_blocks = num_blocks_for(kv_layout, DEFAULT_KV_CACHE_BYTES if given is None else given)
    max_blocks = options.kv_ceiling(kv_layout, num_blocks)
    whole = model_on_meta(config, dtype)
    with open_weights(model_dir, config, whole, options.load_format) as source:
        names = matched_names(source.tensors, whole.weight_destinations())
        for part in parts:
            cuts = WeightCuts(config, part)
            for name in names:
                cuts.of(name)  # may be inside of a quantized weight's block
        revision = source.revision()
    num_threads = options.num_threads or torch.get_num_threads()
    joined = _join(hosts, model_dir)
    channels = RankChannels.open(shape, joined.hosts)
    num_local = shape.num_ranks - sum(len(each.ranks) for each in joined.hosts)
    mode = resolve_mode(options.mode, CPU)
    setup = RankSetup(
        model_dir=str(model_dir.resolve()),
        options=msgspec.structs.replace(options, dtype=dtype, mode=mode),
        max_blocks=max_blocks,
        num_threads=max(1, num_threads // num_local),
        kv=channels.rank_kv,
        masks=channels.rank_masks,
    )
    spec = group_spec(
        "shared.engine.executors.group.rank_work:ModelWork",
        msgspec.msgpack.encode(setup),
        shape,
        channels,
        num_threads=setup.num_threads,
        joined=joined,
    )
    group, parent_thread = start_group(spec, channels, model_dir)
    report_links(
        config,
        shape,
        spec.hosts,
        group.links,
        dtype=dtype,
        activations=options.activations,
    )
    model = GroupModel(
        kv_layout=kv_layout,
        numerics=device_numerics(CPU, dtype, mode, options.activations, kv_dtype=kv_dtype),
        num_blocks=num_blocks,
        max_blocks=max_blocks,
        max_context_tokens=options.context_tokens(config, max_blocks),
        vocab_size=config.vocab_size,
        eos_token_ids=config.eos_token_ids,
        has_head=config.has_head,
        revision=revision,
        depth=shape.pp,
        work=model_work(
            config, item_bytes=ITEM_BYTES[dtype], kv_item_bytes=ITEM_BYTES[kv_layout.dtype]
        ),
    )
    clock = MonotonicClock()
    return GroupExecutor(
        GroupSteps(group, channels.masks, parent_thread, clock),
        RankLinks(channels.kv, kv_shards(parts)),
        model,
        num_stages=shape.pp,
        clock=clock,
    )


def _join(hosts: HostListener | None, model_dir: Path) -> JoinedHosts:
    try:
        return JoinedHosts.wait(hosts, LOAD_TIMEOUT_S)
    except GroupLost as error:
        raise CheckpointError(f"{model_dir}: {error}") from None
