"""What each pair of processes exchanges, for workers that are cut differently."""

from __future__ import annotations

from itertools import pairwise

import hypothesis.strategies as st
from hypothesis import given

from shared.engine.parallel.cuts import head_lanes, kv_head_range, rank_range
from shared.kv_layout import KvGroup, KvLayout, KvShard, PagedKv, Window
from shared.kv_wire.coverage import Coverage
from shared.kv_wire.shards import in_group, in_groups, parts_of_groups, sent_shards

DIM = 32


def layout_of(num_layers: int, num_kv_heads: int, num_groups: int) -> KvLayout:
    """Of two groups, one sees the layers with even and one those with odd numbers."""
    reaches = (None, Window(9))[:num_groups]
    groups = tuple(
        KvGroup(
            tuple(range(group, num_layers, num_groups)), PagedKv(num_kv_heads, DIM, "uint8", reach)
        )
        for group, reach in enumerate(reaches)
    )
    return KvLayout(groups)


def shards_of(layout: KvLayout, num_heads: int, tp: int, pp: int) -> list[KvShard]:
    """What each rank holds; stages have as many layers as possible, the last the rest."""
    size = -(-layout.num_layers // pp)
    borders = [min(each * size, layout.num_layers) for each in range(pp)] + [layout.num_layers]
    found = []
    for first_layer, end_layer in pairwise(borders):
        for rank in range(tp):
            first, end = rank_range(head_lanes(num_heads, DIM), rank, tp)
            heads = kv_head_range((first // DIM, end // DIM), num_heads, layout.state.row[1])
            found.append(KvShard.of(range(first_layer, end_layer), range(*heads)))
    return found


sizes = st.tuples(st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 3]))


@given(
    source=sizes,
    target=sizes,
    num_groups=st.sampled_from([1, 2]),
    heads=st.sampled_from([(8, 1), (8, 2), (8, 8), (16, 4), (28, 4)]),
    num_layers=st.sampled_from([3, 4, 7]),
)
def test_each_cell_reaches_each_holder_once(
    source: tuple[int, int],
    target: tuple[int, int],
    num_groups: int,
    heads: tuple[int, int],
    num_layers: int,
) -> None:
    num_heads, num_kv_heads = heads
    layout = layout_of(num_layers, num_kv_heads, num_groups)
    held = shards_of(layout, num_heads, *source)
    sent = sent_shards(held)
    assert all(mine.crossing(own) == mine for mine, own in zip(sent, held, strict=True))
    assert sum(each.num_cells for each in sent) == layout.whole.num_cells
    for receiver in shards_of(layout, num_heads, *target):
        for group in range(num_groups):
            of_group = in_group(layout, group, receiver)
            parts = [in_group(layout, group, each.crossing(receiver)) for each in sent]
            cells = [
                (layer, head) for part in parts for layer in part.layers for head in part.heads
            ]
            assert sorted(cells) == [
                (layer, head) for layer in of_group.layers for head in of_group.heads
            ]


@given(data=st.data(), num_tokens=st.integers(1, 40), first_token=st.integers(0, 40))
def test_tokens_are_held_once_all_parts_have_them(
    data: st.DataObject, num_tokens: int, first_token: int
) -> None:
    """Parts arrive in any order, by chunks of any size."""
    first_token = min(first_token, num_tokens)
    layout = layout_of(4, 4, 1)
    shard = KvShard(0, 4, 0, 4)
    parts = [each for each in shards_of(layout, 8, 2, 2) if each.num_cells]
    coverage = Coverage(shard, first_token=first_token, end=num_tokens)
    held = dict.fromkeys(parts, first_token)
    while any(each < num_tokens for each in held.values()):
        part = data.draw(st.sampled_from([each for each in parts if held[each] < num_tokens]))
        size = data.draw(st.integers(1, num_tokens - held[part]))
        assert coverage.next_token(part) == held[part]
        assert coverage.take(part, size) == held[part]
        assert coverage.num_held_tokens == min(held.values())
        coverage.hold(part, held[part])
        held[part] += size
        assert coverage.num_held_tokens == min(held.values())
    assert coverage.is_complete


def test_part_that_overlaps_or_lies_outside_continues_nothing() -> None:
    coverage = Coverage(KvShard(2, 2, 0, 4), first_token=0, end=8)
    coverage.take(KvShard(2, 2, 0, 2), 8)
    overlapping, outside = KvShard(2, 1, 1, 2), KvShard(0, 2, 0, 4)
    for part in (overlapping, outside, KvShard(2, 0, 0, 2), KvShard(2, 3, 2, 2)):
        assert coverage.next_token(part) is None
    assert coverage.next_token(KvShard(2, 2, 2, 2)) == 0


def test_empty_shard_waits_for_nothing() -> None:
    assert Coverage(KvShard(0, 0, 0, 2), first_token=0, end=8).is_complete
    assert not Coverage(KvShard(0, 1, 0, 2), first_token=0, end=8).is_complete


def test_layers_of_a_group_are_counted_in_it() -> None:
    layout = layout_of(5, 2, 2)
    assert in_groups(layout, KvShard(1, 3, 0, 1)) == [KvShard(1, 1, 0, 1), KvShard(0, 2, 0, 1)]
    shards = [KvShard(0, 2, 0, 2), KvShard(0, 2, 0, 2)]  # of groups with 3 and 2 layers
    assert parts_of_groups(layout, shards) == [shards[0], None]
    assert KvShard(3, 1, 1, 1).relative_to(KvShard(1, 3, 1, 1)) == KvShard(2, 1, 0, 1)
