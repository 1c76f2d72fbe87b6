from __future__ import annotations

import pytest

from shared.kv_layout import (
    Chunk,
    KvGroup,
    KvLayout,
    LatentKv,
    PagedKv,
    Reach,
    Window,
    first_seen,
    group_layers,
)


def kv(reach: Reach = None) -> PagedKv:
    return PagedKv(8, 128, "bfloat16", reach)


def layout(*states: PagedKv, block_size: int = 16) -> KvLayout:
    return KvLayout(group_layers(states), block_size)


@pytest.mark.parametrize("position", range(70))
def test_a_reach_starts_at_its_first_visible_key(position: int) -> None:
    keys = range(position + 1)
    assert first_seen(None, position) == 0
    for tokens in (1, 2, 16, 33):
        in_window = [key for key in keys if position - tokens < key]
        in_chunk = [key for key in keys if key // tokens == position // tokens]
        assert first_seen(Window(tokens), position) == in_window[0]
        assert first_seen(Chunk(tokens), position) == in_chunk[0]


@pytest.mark.parametrize("tokens", [0, -1])
def test_a_reach_must_be_positive(tokens: int) -> None:
    with pytest.raises(ValueError, match=f"a window of {tokens} tokens is not positive"):
        Window(tokens)
    with pytest.raises(ValueError, match=f"a chunk of {tokens} tokens is not positive"):
        Chunk(tokens)


def test_keys_of_dense_models_do_not_change() -> None:
    """Another key would discard every cache of a fleet."""
    full, local = kv(), kv(Window(4096))
    assert layout(*[full] * 32).key == "bfloat16/b16/l32/h8/d128"
    assert layout(*[local] * 32).key == "bfloat16/b16/l32/h8/d128"
    assert layout(*[local, full] * 13).key == "bfloat16/b16/l26/h8/d128"
    assert layout(*[full] * 32, block_size=64).key == "bfloat16/b16/l32/h8/d128"


def test_keys_of_other_states_name_them() -> None:
    assert layout(*[kv(Chunk(8192))] * 3, kv()).key == "bfloat16/b16/l4/h8/d128/c8192"
    latent = KvLayout((KvGroup((0, 1), LatentKv(512, 64, "bfloat16")),))
    assert latent.key == "bfloat16/b16/l2/latent512+64"
    assert latent.bytes_per_token == 2 * 576 * 2


def sizes(*states: PagedKv) -> list[tuple[Reach, int]]:
    return [(group.state.reach, len(group.layers)) for group in group_layers(states)]


def test_groups_have_equally_many_layers() -> None:
    full, local, chunked = kv(), kv(Window(128)), kv(Chunk(8192))
    assert sizes(*[full] * 32) == [(None, 32)]
    assert sizes(*[local, full] * 12) == [(None, 12), (Window(128), 12)]
    scout = [full if layer % 4 == 3 else chunked for layer in range(48)]
    assert sizes(*scout) == [(None, 12)] + [(Chunk(8192), 12)] * 3


def test_short_groups_are_padded_by_at_most_8_percent() -> None:
    gemma3 = [kv() if layer % 6 == 5 else kv(Window(512)) for layer in range(26)]
    assert sizes(*gemma3) == [(None, 4)] + [(Window(512), 4)] * 5 + [(Window(512), 2)]
    found = layout(*gemma3)
    assert found.num_slots * len(found.groups) == 28
    assert sorted(layer for group in found.groups for layer in group.layers) == list(range(26))


def test_layers_that_would_make_too_many_groups_form_one() -> None:
    assert sizes(*[kv()] * 97, kv(Window(8)), kv(Window(9)), kv(Window(10))) == [(None, 100)]


def test_bytes_of_a_block_are_those_of_its_group() -> None:
    scout = layout(*[kv() if layer % 4 == 3 else kv(Chunk(8192)) for layer in range(48)])
    row = 2 * 8 * 128 * 2
    assert scout.bytes_per_token == 48 * row
    assert scout.block_bytes == 12 * row * 16
    assert scout.group_bytes_per_token(0) == 12 * row
