"""Which ranks form tensor-parallel groups and which form stages, from measured links. Pure.

Tensor parallelism exchanges two sums a layer, a pipeline one row a stage: so tensor-parallel groups
lie inside a host, and links between hosts are crossed by stages alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, permutations
from typing import Annotated

import msgspec
from msgspec import Meta

from shared.config import TP_SIZES
from shared.engine.parallel.lane_sums import Exchange

MAX_HOSTS = 8
SUMS_PER_LAYER = 2  # o_proj and down_proj
ACTIVATION_BYTES = 2
POSITION_BYTES = 4

_Seconds = Annotated[float, Meta(ge=0, lt=1e6)]
_Rate = Annotated[float, Meta(gt=0, lt=1e18)]
_Name = Annotated[str, Meta(min_length=1, max_length=200)]


class Link(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Measured: time of an empty message one way, and bytes a second."""

    latency_s: _Seconds
    bytes_per_s: _Rate

    def seconds(self, num_bytes: float) -> float:
        return self.latency_s + num_bytes / self.bytes_per_s


class Host(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`inside`: the link between two of its ranks."""

    name: _Name
    num_ranks: Annotated[int, Meta(ge=1, le=64)]
    inside: Link


class HostLink(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    hosts: tuple[_Name, _Name]
    link: Link


class LinkTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All hosts, and the link of each pair of them, in either direction."""

    hosts: tuple[Host, ...]
    links: tuple[HostLink, ...] = ()

    def between(self, first: Host, second: Host) -> Link:
        """Raises ValueError if this pair has not been measured."""
        pair = {first.name, second.name}
        for each in self.links:
            if set(each.hosts) == pair:
                return each.link
        raise ValueError(f"the link between {first.name} and {second.name} is not in the table")


def decode_links(data: bytes) -> LinkTable:
    """A table from JSON. Raises ValueError, which names the field."""
    try:
        table = msgspec.json.decode(data, type=LinkTable)
    except msgspec.DecodeError as error:
        raise ValueError(f"not a table of links: {error}") from error
    names = [host.name for host in table.hosts]
    if not 1 <= len(names) <= MAX_HOSTS or len(set(names)) < len(names):
        raise ValueError(f"hosts {names}: 1 to {MAX_HOSTS} of different names are needed")
    for each in table.links:
        if not set(each.hosts) <= set(names) or len(set(each.hosts)) < 2:
            raise ValueError(f"a link between {' and '.join(each.hosts)}: not two of the hosts")
    return table


@dataclass(frozen=True)
class ModelShape:
    """`compute_s`: of one token on one rank that holds the whole model. `tp_sizes`: those that its
    heads allow.
    """

    num_layers: int
    hidden_size: int
    compute_s: float
    tp_sizes: tuple[int, ...] = TP_SIZES
    exchange: Exchange = "fp32"

    @property
    def node_bytes(self) -> int:
        """A sum of lanes, as it is sent."""
        return self.hidden_size * (4 if self.exchange == "fp32" else 2)

    @property
    def row_bytes(self) -> int:
        """What a stage sends to the next one for a token."""
        return self.hidden_size * ACTIVATION_BYTES + POSITION_BYTES


@dataclass(frozen=True)
class ParallelPlan:
    """Stages are in order; each lies on one host and has `tp` ranks.

    Bytes and seconds are of one token of a batch of one, received by a rank (`tensor_bytes`) and
    across all borders of stages (`stage_bytes`).
    """

    tp: int
    hosts: tuple[str, ...]  # of each stage
    tensor_bytes: int
    stage_bytes: int
    exchange_s: float
    token_s: float

    @property
    def pp(self) -> int:
        return len(self.hosts)

    def __str__(self) -> str:
        return (
            f"tp {self.tp} x pp {self.pp} on {' > '.join(self.hosts)}:"
            f" {self.tensor_bytes + self.stage_bytes:,} bytes and {self.exchange_s * 1e6:,.0f} µs"
            f" of exchange a token, {self.token_s * 1e3:,.2f} ms a token"
        )


def choose_plan(table: LinkTable, model: ModelShape) -> ParallelPlan:
    """The plan of all ranks with the least predicted time a token. Raises ValueError."""
    plans = list(_plans(table, model))
    if not plans:
        counts = [host.num_ranks for host in table.hosts]
        raise ValueError(
            f"hosts of {counts} ranks: no tensor parallel size of {list(model.tp_sizes)} divides"
            f" all of them with at most {model.num_layers} stages"
        )
    return min(plans, key=lambda plan: (plan.token_s, plan.pp, plan.hosts))


def _plans(table: LinkTable, model: ModelShape) -> Iterator[ParallelPlan]:
    num_ranks = sum(host.num_ranks for host in table.hosts)
    for tp in model.tp_sizes:
        is_divided = all(host.num_ranks % tp == 0 for host in table.hosts)
        if not is_divided or num_ranks // tp > model.num_layers:
            continue
        for order in permutations(table.hosts):
            yield _plan(table, model, tp, order)


def _plan(table: LinkTable, model: ModelShape, tp: int, order: Sequence[Host]) -> ParallelPlan:
    stages = [host for host in order for _ in range(host.num_ranks // tp)]
    borders = [
        first.inside if first is second else table.between(first, second)
        for first, second in pairwise(stages)
    ]
    layers_per_stage = model.num_layers / len(stages)
    sums_s = sum(layers_per_stage * _sum_s(host.inside, model, tp) for host in stages)
    exchange_s = sums_s + sum(link.seconds(model.row_bytes) for link in borders)
    return ParallelPlan(
        tp,
        tuple(host.name for host in stages),
        tensor_bytes=SUMS_PER_LAYER * model.num_layers * (tp - 1) * model.node_bytes,
        stage_bytes=len(borders) * model.row_bytes,
        exchange_s=exchange_s,
        token_s=model.compute_s / tp + exchange_s,
    )


def _sum_s(inside: Link, model: ModelShape, tp: int) -> float:
    """The sums of one layer: each rank receives the subtree of every other one."""
    received = (tp - 1) * model.node_bytes
    return SUMS_PER_LAYER * inside.seconds(received) if tp > 1 else 0.0
