"""Collectives of one rank, over any transport between the ranks.

Few tokens: all ranks gather each other's subtree sums and add them in the order of the tree. Many:
recursive halving, in which the ranks r and r xor 2^i exchange halves and add, then an all-gather
of the rounded parts: 1.5 times the bytes of a BF16 ring. Both give the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from shared.engine.parallel.lane_sums import check_lanes, halved_range, sum_nodes
from shared.engine.parallel.lanes import Exchange
from shared.engine.parallel.mesh import best_of
from shared.engine.parallel.mesh_shape import ALL_GATHER_BYTES, MeshShape

FP32_BYTES = 4


class Transport(Protocol):
    """Moves contiguous tensors between ranks; each call raises RankLost after a limit."""

    shape: MeshShape
    rank: int
    device: torch.device

    def all_gather(self, x: Tensor) -> list[Tensor]:
        """Returns the tensors of all ranks of this stage, of one shape, in the order of ranks."""

    def swap(self, x: Tensor, rank: int, out: Tensor) -> None:
        """Sends x to a rank and fills `out` with what that rank sends."""

    def send(self, x: Tensor, rank: int) -> None: ...

    def recv(self, out: Tensor, rank: int) -> None: ...

    def close(self) -> None: ...


class RankMesh:
    """A `Mesh` over a transport.

    `all_gather_bytes` is the largest sum, in FP32, that is gathered and not halved.
    `num_sent_bytes` counts the bytes that this rank has sent, once for each receiver.
    """

    def __init__(
        self,
        transport: Transport,
        exchange: Exchange = "fp32",
        all_gather_bytes: int = ALL_GATHER_BYTES,
    ) -> None:
        self.shape, self.rank = transport.shape, transport.rank
        self._stage, self._tp_rank = self.shape.place(self.rank)
        self.transport = transport
        self.exchange: Exchange = exchange
        self._all_gather_bytes = all_gather_bytes
        self.num_sent_bytes = 0

    def add(self, lanes: Tensor, dtype: torch.dtype) -> Tensor:
        check_lanes(lanes, self.shape.tp, self.exchange)
        if self.shape.tp == 1:
            return sum_nodes(lanes.unbind(), self.exchange, is_root=True).to(dtype)
        own = sum_nodes(lanes.unbind(), self.exchange, is_root=False)
        return self._add_nodes(own.contiguous(), dtype, self.exchange)

    def join(self, nodes: Tensor, dtype: torch.dtype) -> Tensor:
        """Values of BF16 are nodes of BF16 without rounding, so they are sent as such."""
        if self.shape.tp == 1:
            return nodes.to(dtype)
        is_bf16 = dtype == torch.bfloat16
        own = nodes.to(dtype) if is_bf16 else nodes
        return self._add_nodes(own.contiguous(), dtype, "bf16" if is_bf16 else "fp32")

    def _add_nodes(self, own: Tensor, dtype: torch.dtype, exchange: Exchange) -> Tensor:
        if own.numel() * FP32_BYTES > self._all_gather_bytes:
            return self._add_halves(own, dtype, exchange)
        nodes = self._all_gather(own)
        return sum_nodes(nodes, exchange, is_root=True).to(dtype)

    def _add_halves(self, own: Tensor, dtype: torch.dtype, exchange: Exchange) -> Tensor:
        part = own.view(-1)
        num_levels = self.shape.tp.bit_length() - 1
        for level in range(num_levels):
            part = self._add_half(part, level, exchange, is_root=level == num_levels - 1)
        return self._gather_parts(part.to(dtype), own)

    def _add_half(self, part: Tensor, level: int, exchange: Exchange, *, is_root: bool) -> Tensor:
        middle = (part.numel() + 1) // 2
        first, second = part[:middle], part[middle:]
        is_lower = self._tp_rank & (1 << level) == 0
        retained, sent = (first, second) if is_lower else (second, first)
        received = torch.empty_like(retained)
        peer = self.shape.rank_of(self._stage, self._tp_rank ^ (1 << level))
        self.num_sent_bytes += _num_bytes(sent)
        self.transport.swap(sent, peer, received)
        nodes = (retained, received) if is_lower else (received, retained)
        return sum_nodes(nodes, exchange, is_root=is_root)

    def _gather_parts(self, part: Tensor, own: Tensor) -> Tensor:
        tp = self.shape.tp
        ranges = [halved_range(tp_rank, tp, own.numel()) for tp_rank in range(tp)]
        sizes = [end - begin for begin, end in ranges]
        out = own.new_empty(own.numel(), dtype=part.dtype)
        for (begin, end), each in zip(ranges, self._gather_uneven(part, 0, sizes), strict=True):
            out[begin:end] = each
        return out.view(own.shape)

    def gather(self, x: Tensor, dim: int, sizes: Sequence[int] | None = None) -> Tensor:
        if self.shape.tp == 1:
            return x
        if sizes is None:
            return torch.cat(self._all_gather(x.contiguous()), dim)
        if len(sizes) != self.shape.tp or sizes[self._tp_rank] != x.shape[dim]:
            raise ValueError(f"a part of {x.shape[dim]} does not match the ranks' sizes {sizes}")
        return torch.cat(self._gather_uneven(x, dim, sizes), dim)

    def _gather_uneven(self, x: Tensor, dim: int, sizes: Sequence[int]) -> list[Tensor]:
        """Parts are padded to the largest: all ranks send equally many bytes."""
        padded_shape = list(x.shape)
        padded_shape[dim] = max(sizes)
        if x.shape[dim] < max(sizes):
            padded = x.new_zeros(padded_shape)
            padded.narrow(dim, 0, x.shape[dim]).copy_(x)
            x = padded
        parts = self._all_gather(x.contiguous())
        return [part.narrow(dim, 0, size) for part, size in zip(parts, sizes, strict=True)]

    def best(self, values: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        if self.shape.tp == 1:
            return values, ids
        all_values = torch.stack(self._all_gather(values.contiguous()))
        all_ids = torch.stack(self._all_gather(ids.contiguous()))
        return best_of(all_values, all_ids)

    def send(self, x: Tensor) -> None:
        if self._stage == self.shape.pp - 1:
            raise ValueError(f"rank {self.rank} is in the last stage: it sends to no other")
        self.num_sent_bytes += _num_bytes(x)
        self.transport.send(x.contiguous(), self.rank + self.shape.tp)

    def recv(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        if self._stage == 0:
            raise ValueError(f"rank {self.rank} is in the first stage: it receives from no other")
        out = torch.empty(math.prod(shape), dtype=dtype, device=self.transport.device)
        self.transport.recv(out, self.rank - self.shape.tp)
        return out.view(*shape)

    def _all_gather(self, x: Tensor) -> list[Tensor]:
        self.num_sent_bytes += _num_bytes(x) * (self.shape.tp - 1)
        return self.transport.all_gather(x)

    def close(self) -> None:
        self.transport.close()


def _num_bytes(x: Tensor) -> int:
    return x.numel() * x.element_size()
