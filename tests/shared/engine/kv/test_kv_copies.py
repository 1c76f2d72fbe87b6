"""Parts of a paged cache that are read for and written by workers cut differently."""

from __future__ import annotations

import pytest
import torch

from shared.engine.kv.kv_copies import KvCopies
from shared.engine.step import KvRun
from shared.kv_layout import KvGroup, KvLayout, KvShard, PagedKv

NUM_LAYERS, NUM_HEADS, DIM, BLOCK_SIZE, NUM_BLOCKS = 3, 4, 8, 16, 6
TABLE, FIRST, COUNT = [4, 1, 3], 5, 30
SHARDS = [KvShard(0, 3, 0, 2), KvShard(0, 3, 3, 1), KvShard(1, 2, 0, 4), KvShard(2, 1, 1, 2)]


def copies_of(dtype: str, *, is_filled: bool = True) -> KvCopies:
    group = KvGroup(tuple(range(NUM_LAYERS)), PagedKv(NUM_HEADS, DIM, dtype))
    shape = (NUM_LAYERS, 2, NUM_BLOCKS, NUM_HEADS, BLOCK_SIZE, DIM)
    cache = torch.zeros(shape, dtype=getattr(torch, dtype))
    if is_filled:
        generator = torch.Generator().manual_seed(1)
        cache.copy_(torch.randint(0, 250, shape, generator=generator))
    return KvCopies(cache, KvLayout((group,), BLOCK_SIZE))


def read(copies: KvCopies, shard: KvShard | None) -> torch.Tensor:
    """[layers, planes, tokens, heads, dim]"""
    layers, heads = (
        (NUM_LAYERS, NUM_HEADS) if shard is None else (shard.num_layers, shard.num_heads)
    )
    out = bytearray(layers * heads * COUNT * copies.kv_layout.cell_bytes)
    copies.read_kv(KvRun(TABLE, FIRST, COUNT, 0, shard), memoryview(out))
    flat = torch.frombuffer(out, dtype=torch.uint8).view(copies.kv_cache.dtype)
    return flat.view(layers, 2, COUNT, heads, DIM)


def bits(x: torch.Tensor) -> torch.Tensor:
    """torch compares no FP8."""
    return x.contiguous().view(torch.uint8)


@pytest.mark.parametrize("dtype", ["bfloat16", "uint8", "float8_e4m3fn"])
@pytest.mark.parametrize("shard", SHARDS)
def test_part_is_the_slice_of_the_whole(shard: KvShard, dtype: str) -> None:
    source, target = copies_of(dtype), copies_of(dtype, is_filled=False)
    layers = slice(shard.first_layer, shard.layers.stop)
    heads = slice(shard.first_head, shard.heads.stop)
    part = read(source, shard)
    assert bits(part).equal(bits(read(source, None)[layers, :, :, heads]))
    payload = part.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    target.write_kv(KvRun(TABLE, FIRST, COUNT, 0, shard), memoryview(payload))
    written = read(target, None)
    assert bits(written[layers, :, :, heads]).equal(bits(part))
    num_written = bits(target.kv_cache).count_nonzero()
    assert num_written == bits(part).count_nonzero()  # and no other place
    target.zero_blocks(TABLE)
    assert not bits(target.kv_cache).any()


def test_part_outside_of_the_cache_is_an_error() -> None:
    with pytest.raises(ValueError, match="is not within"):
        read(copies_of("uint8"), KvShard(0, 3, 3, 2))
