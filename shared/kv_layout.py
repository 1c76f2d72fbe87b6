"""The layout of KV: which state each layer has, in groups of layers that share block tables.

A group is named by its index. Every cache tier is keyed by the layout's `key` and the block hash.
On the wire, the KV of consecutive tokens of one group is contiguous with shape [layers of the
group, planes, num_tokens, num_heads, dim].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, TypeAlias

import msgspec

FP8 = "float8_e4m3fn"
ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, FP8: 1, "uint8": 1}
MAX_PADDING = 0.08  # share of a block's bytes, so that groups have equally many layers
MAX_GROUPS = 16
ShardIndex = Annotated[int, msgspec.Meta(ge=0, le=2**16)]


class Window(msgspec.Struct, frozen=True, tag="window"):
    """Position p sees key j if p - tokens < j <= p."""

    tokens: int

    def __post_init__(self) -> None:
        _expect_positive("window", self.tokens)

    def first_seen(self, position: int) -> int:
        return max(0, position - self.tokens + 1)


class Chunk(msgspec.Struct, frozen=True, tag="chunk"):
    """Position p sees key j if j // tokens == p // tokens and j <= p; `tokens` need not be a
    multiple of the block size.
    """

    tokens: int

    def __post_init__(self) -> None:
        _expect_positive("chunk", self.tokens)

    def first_seen(self, position: int) -> int:
        return position // self.tokens * self.tokens


Reach: TypeAlias = Window | Chunk | None  # None: all keys up to the position


class PagedKv(msgspec.Struct, frozen=True, tag="kv"):
    """Keys and values of `num_kv_heads` heads."""

    num_kv_heads: int
    head_dim: int
    dtype: str
    reach: Reach = None

    @property
    def row(self) -> tuple[int, int, int]:
        """The planes, heads and elements of one token of one layer."""
        return 2, self.num_kv_heads, self.head_dim


class LatentKv(msgspec.Struct, frozen=True, tag="latent"):
    """One plane of one head; the values are its first `latent_dim` elements."""

    latent_dim: int
    rope_dim: int
    dtype: str

    @property
    def reach(self) -> Reach:
        return None

    @property
    def row(self) -> tuple[int, int, int]:
        return 1, 1, self.latent_dim + self.rope_dim


LayerState: TypeAlias = PagedKv | LatentKv


class KvShard(msgspec.Struct, frozen=True):
    """A range of layers × a range of KV heads. Layers are counted in the model or in one group."""

    first_layer: ShardIndex
    num_layers: ShardIndex
    first_head: ShardIndex
    num_heads: ShardIndex

    @classmethod
    def of(cls, layers: range, heads: range) -> KvShard:
        return cls(layers.start, len(layers), heads.start, len(heads))

    @property
    def layers(self) -> range:
        return range(self.first_layer, self.first_layer + self.num_layers)

    @property
    def heads(self) -> range:
        return range(self.first_head, self.first_head + self.num_heads)

    @property
    def num_cells(self) -> int:
        """The product of the numbers of layers and heads."""
        return self.num_layers * self.num_heads

    def crossing(self, other: KvShard) -> KvShard:
        """Returns the part that both contain, which may be empty."""
        return KvShard.of(_crossing(self.layers, other.layers), _crossing(self.heads, other.heads))

    def relative_to(self, outer: KvShard) -> KvShard:
        """Returns the same range, counted from the first layer and head of `outer`,
        which contains it.
        """
        return KvShard(
            self.first_layer - outer.first_layer,
            self.num_layers,
            self.first_head - outer.first_head,
            self.num_heads,
        )


def _crossing(one: range, other: range) -> range:
    first = max(one.start, other.start)
    return range(first, max(first, min(one.stop, other.stop)))


class KvGroup(msgspec.Struct, frozen=True):
    """Layers with equal states, by their index in the model."""

    layers: tuple[int, ...]
    state: LayerState


class KvLayout(msgspec.Struct, frozen=True):
    """Two workers can exchange KV if their `key` is equal.

    A block holds `block_size` tokens of one group; all have the same bytes, so that any block
    serves any group. Block identity is in units of `hash_tokens`.
    """

    groups: tuple[KvGroup, ...]
    block_size: int = 16
    hash_tokens: int = 16

    def __post_init__(self) -> None:
        rows = {(group.state.row, group.state.dtype) for group in self.groups}
        if len(rows) != 1:
            raise ValueError(f"groups of {len(rows)} shapes cannot share blocks")
        if self.block_size % self.hash_tokens:
            raise ValueError(f"blocks of {self.block_size} are no multiple of {self.hash_tokens}")

    @property
    def state(self) -> LayerState:
        """The state of every layer except for its reach."""
        return self.groups[0].state

    @property
    def dtype(self) -> str:
        return self.state.dtype

    @property
    def num_layers(self) -> int:
        return sum(len(group.layers) for group in self.groups)

    @property
    def num_slots(self) -> int:
        """Layers of the largest group; in smaller ones the last slots of a block are unused."""
        return max(len(group.layers) for group in self.groups)

    @property
    def places(self) -> tuple[tuple[int, int], ...]:
        """The group of each layer, [num_layers], and its slot in the group's blocks."""
        found = {
            layer: (index, slot)
            for index, group in enumerate(self.groups)
            for slot, layer in enumerate(group.layers)
        }
        return tuple(found[layer] for layer in range(self.num_layers))

    @property
    def reaches(self) -> tuple[Reach, ...]:
        """The reach of each group, [G]."""
        return tuple(group.state.reach for group in self.groups)

    @property
    def key(self) -> str:
        return f"{self.dtype}/b{self.hash_tokens}/l{self.num_layers}{self._shape_key}"

    @property
    def _shape_key(self) -> str:
        if isinstance(self.state, LatentKv):
            return f"/latent{self.state.latent_dim}+{self.state.rope_dim}"
        chunks = sorted({each.tokens for each in self.reaches if isinstance(each, Chunk)})
        suffix = "".join(f"/c{tokens}" for tokens in chunks)
        return f"/h{self.state.num_kv_heads}/d{self.state.head_dim}{suffix}"

    @property
    def whole(self) -> KvShard:
        """All layers and heads of the model."""
        return KvShard(0, self.num_layers, 0, self.state.row[1])

    @property
    def cell_bytes(self) -> int:
        """Bytes of one token in one layer and head."""
        planes, _, dim = self.state.row
        return planes * dim * ITEM_BYTES[self.dtype]

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token in all layers."""
        return self.num_layers * self._row_bytes

    def group_bytes_per_token(self, group: int) -> int:
        return len(self.groups[group].layers) * self._row_bytes

    @property
    def block_bytes(self) -> int:
        return self.num_slots * self._row_bytes * self.block_size

    @property
    def _row_bytes(self) -> int:
        return self.state.row[1] * self.cell_bytes


def first_seen(reach: Reach, position: int) -> int:
    """Returns the first key that `position` sees."""
    return 0 if reach is None else reach.first_seen(position)


def first_sent(reach: Reach, num_tokens: int, hash_tokens: int) -> int:
    """Returns the first token whose KV continues a prefix of `num_tokens`, from its last full hash
    unit on, so that the prefix is found again. In full hash units.
    """
    position = num_tokens // hash_tokens * hash_tokens
    return first_seen(reach, position) // hash_tokens * hash_tokens


def _expect_positive(name: str, tokens: int) -> None:
    if tokens < 1:
        raise ValueError(f"a {name} of {tokens} tokens is not positive")


def group_layers(states: Sequence[LayerState]) -> tuple[KvGroup, ...]:
    """Groups of layers with equal states, as few as possible with at most MAX_PADDING of unused
    bytes; those that see all keys come first. Layers of more than MAX_GROUPS such groups form one
    group without a reach: their blocks are held as long as their sequence.
    """
    by_state: dict[LayerState, list[int]] = {}
    for layer, state in sorted(enumerate(states), key=lambda each: each[1].reach is not None):
        by_state.setdefault(state, []).append(layer)
    for size in range(max(map(len, by_state.values())), 0, -1):
        groups = [
            KvGroup(tuple(layers[first : first + size]), state)
            for state, layers in by_state.items()
            for first in range(0, len(layers), size)
        ]
        num_slots = len(groups) * max(len(group.layers) for group in groups)
        if num_slots <= len(states) * (1 + MAX_PADDING) and len(groups) <= MAX_GROUPS:
            return tuple(groups)
    whole = states[0]
    if isinstance(whole, PagedKv):
        whole = msgspec.structs.replace(whole, reach=None)
    return (KvGroup(tuple(range(len(states))), whole),)
