"""Starts the only rank of a worker on one CUDA device, and returns its executor.

The calling process does not use the device, and so survives the loss of it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import torch

from shared.clock import MonotonicClock
from shared.config import default_block_size
from shared.engine.executors.group.group_executor import GroupExecutor
from shared.engine.executors.group.group_steps import COMMAND_TIMEOUT_S, GroupSteps
from shared.engine.executors.group.joined_hosts import RankChannels
from shared.engine.executors.group.kv.rank_links import RankLinks
from shared.engine.executors.group.messages import DescribeModel, DeviceSetup, GroupModel
from shared.engine.executors.group.start_group import group_spec, start_group
from shared.engine.executors.loading.load_options import LoadOptions, OnPhase, ignore_phase
from shared.engine.parallel.mesh_shape import MeshShape
from shared.engine.parallel.processes.group import RankGroup
from shared.engine.parallel.processes.watchdog import GroupLost
from shared.errors import CheckpointError
from shared.numerics import ModeChoice

SHAPE = MeshShape(1, 1)
CUDA_RANK = "shared.engine.executors.group.cuda_rank:CudaRank"


def load_cuda_rank(
    model_dir: Path,
    device: str,
    *,
    mode: ModeChoice = "exact",
    on_phase: OnPhase = ignore_phase,
    entry: str = CUDA_RANK,
    **options: Any,
) -> GroupExecutor:
    """Returns once the rank has loaded the model. `options` are the other fields of `LoadOptions`.
    Raises CheckpointError, which says what the rank raised.
    """
    if options.get("block_size") is None:
        options["block_size"] = default_block_size(device)
    num_threads = options.get("num_threads") or torch.get_num_threads()
    channels = RankChannels.open(SHAPE, ())
    setup = DeviceSetup(
        model_dir=str(model_dir.resolve()),
        device=device,
        mode=mode,
        options=LoadOptions(**options),
        kv=channels.rank_kv[0],
        masks=channels.rank_masks,
    )
    config = msgspec.msgpack.encode(setup)
    spec = group_spec(entry, config, SHAPE, channels, num_threads=num_threads)
    group, parent_thread = start_group(spec, channels, model_dir, on_phase)
    model = _described(group, model_dir)
    clock = MonotonicClock()
    return GroupExecutor(
        GroupSteps(group, channels.masks, parent_thread, clock),
        RankLinks(channels.kv, (model.kv_layout.whole,)),
        model,
        num_stages=1,
        clock=clock,
    )


def _described(group: RankGroup, model_dir: Path) -> GroupModel:
    """Asks the rank what it has loaded: the memory of its device determines the size of the KV."""
    try:
        group.submit(msgspec.msgpack.encode(DescribeModel()), COMMAND_TIMEOUT_S)
        answer = group.take(None)
    except GroupLost as error:
        raise CheckpointError(f"{model_dir}: {error}") from None
    assert answer is not None, "it waits"
    return msgspec.msgpack.decode(answer.data, type=GroupModel)
