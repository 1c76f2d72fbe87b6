"""The layout of a rank's KV. It has the groups of the whole model, so that tables are the same."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from shared.engine.parallel.rank_part import RankPart
from shared.kv_layout import KvGroup, KvLayout, KvShard, PagedKv


def rank_layout(layout: KvLayout, part: RankPart) -> KvLayout:
    """Returns `layout` with the layers and key-value heads of `part`; groups of other stages are
    empty.
    """
    groups = []
    for group in layout.groups:
        layers = (each - part.layers.start for each in group.layers if each in part.layers)
        state = group.state
        if isinstance(state, PagedKv):
            state = replace(state, num_kv_heads=len(part.kv_heads))
        groups.append(KvGroup(tuple(layers), state))
    return replace(layout, groups=tuple(groups))


def kv_shards(parts: Sequence[RankPart]) -> list[KvShard]:
    """Returns the part of the KV that each rank holds."""
    return [KvShard.of(part.layers, part.kv_heads) for part in parts]
