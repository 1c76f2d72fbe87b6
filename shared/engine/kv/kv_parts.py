"""Parts of a run of KV, by its layers: where a device has no memory for a copy of all."""

from __future__ import annotations

from shared.engine.step import KvRun
from shared.kv_layout import KvLayout, KvShard


def halves(layout: KvLayout, run: KvRun, memory: memoryview) -> list[tuple[KvRun, memoryview]]:
    """Returns a run of KV, and where it lies in the host's memory, in two parts of its layers; as
    it is if it has one.
    """
    shard = run.shard
    if shard is None:
        shard = KvShard(0, len(layout.groups[run.group].layers), 0, layout.state.row[1])
    middle = shard.num_layers // 2
    if not middle:
        return [(run, memory)]
    first, end = shard.first_layer, shard.layers.stop
    cut = memory.nbytes // shard.num_layers * middle
    return [
        (_of_layers(run, shard, range(first, first + middle)), memory[:cut]),
        (_of_layers(run, shard, range(first + middle, end)), memory[cut:]),
    ]


def _of_layers(run: KvRun, shard: KvShard, layers: range) -> KvRun:
    return KvRun(
        run.block_table, run.first_token, run.num_tokens, run.group, KvShard.of(layers, shard.heads)
    )
