"""Computes the part of the KV that each pair of a sending and a receiving process exchanges. Pure.

    prefill, 2 ranks          decode, 4 ranks
    heads 0 1 │ 2 3           0 │ 1 │ 2 │ 3        rank 0 pushes to the first two of decode

Heads that several senders hold are sent by the first of them; each receiver gets all of its own.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from shared.kv_layout import KvLayout, KvShard


def sent_shards(held: Sequence[KvShard]) -> list[KvShard]:
    """Returns the part that each process sends of what it holds, by rank: no cell twice. A shard
    may be empty.

    Ranks with equal layers hold ascending ranges of heads, which may overlap.
    """
    next_head: dict[range, int] = {}
    found = []
    for shard in held:
        first = max(shard.first_head, next_head.get(shard.layers, 0))
        found.append(KvShard.of(shard.layers, range(first, max(first, shard.heads.stop))))
        next_head[shard.layers] = max(next_head.get(shard.layers, 0), shard.heads.stop)
    return found


def in_group(layout: KvLayout, group: int, shard: KvShard) -> KvShard:
    """Converts `shard`, which counts the model's layers, to layers of `group`; it may be empty."""
    layers = layout.groups[group].layers
    first, end = (bisect_left(layers, at) for at in (shard.layers.start, shard.layers.stop))
    return KvShard.of(range(first, end), shard.heads)


def in_groups(layout: KvLayout, shard: KvShard) -> list[KvShard]:
    """[G] `in_group` of each."""
    return [in_group(layout, group, shard) for group in range(len(layout.groups))]


def parts_of_groups(layout: KvLayout, shards: Sequence[KvShard]) -> list[KvShard | None]:
    """[G] the shard of each group, or None where it has all layers and heads."""
    wholes = in_groups(layout, layout.whole)
    return [None if shard == whole else shard for shard, whole in zip(shards, wholes, strict=True)]
