"""Chooses the ranks of tensor-parallel groups and of stages from a table of links. Pure.

Tensor parallelism exchanges two sums a layer, a pipeline one row a stage: so tensor-parallel groups
lie inside a host, and links between hosts are crossed by stages alone, unless asked otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise

from shared.config import TP_SIZES
from shared.engine.parallel.links import EXCHANGE_LATENCIES, Host, Link, LinkTable
from shared.engine.planning.step_bytes import StepShape, Traffic


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A model for a plan. `compute_s` is the time of a step on one rank that holds the whole model.
    Its heads allow `tp_sizes`. `layers_of` returns the layers of each of so many stages.
    """

    num_layers: int
    step: StepShape
    compute_s: float
    layers_of: Callable[[int], Sequence[int]]
    tp_sizes: tuple[int, ...] = TP_SIZES


@dataclass(frozen=True)
class ParallelPlan:
    """Stages are in order, each a tuple of the hosts of its ranks.

    Bytes and exchanges are of one step: `rank_bytes` by stage, of what each of its ranks sends to
    others of the stage; `border_bytes` over each border of stages; `host_bytes` over all links
    between hosts. `step_s`: predicted, with the computation.
    """

    stages: tuple[tuple[str, ...], ...]
    rank_bytes: tuple[float, ...]
    border_bytes: int
    host_bytes: float
    num_exchanges: int
    num_host_exchanges: int
    exchange_s: float
    step_s: float

    @property
    def tp(self) -> int:
        return len(self.stages[0])

    @property
    def pp(self) -> int:
        return len(self.stages)

    @property
    def hosts(self) -> tuple[str, ...]:
        """Hosts of each stage; a stage on several hosts is `a+b`."""
        return tuple("+".join(dict.fromkeys(each)) for each in self.stages)

    @property
    def spans_hosts(self) -> bool:
        """Whether a tensor-parallel group crosses links between hosts."""
        return any(len(set(each)) > 1 for each in self.stages)

    @property
    def num_bytes(self) -> float:
        """Bytes that all ranks send."""
        return sum(self.rank_bytes) * self.tp + self.border_bytes * (self.pp - 1)


def choose_plan(plans: Sequence[ParallelPlan]) -> ParallelPlan:
    """Returns the plan with the least predicted time, if possible among those whose tensor-parallel
    groups lie inside a host.
    """
    inside = [plan for plan in plans if not plan.spans_hosts]
    return min(inside or plans, key=lambda plan: (plan.step_s, plan.pp, plan.hosts))


def all_plans(table: LinkTable, model: ModelShape) -> list[ParallelPlan]:
    """Returns one plan for each number of stages that uses all ranks. Raises ValueError
    if there is none.
    """
    plans = list(_plans(table, model))
    if not plans:
        counts = [host.num_ranks for host in table.hosts]
        raise ValueError(
            f"hosts of {counts} ranks: no tensor parallel size of {list(model.tp_sizes)} divides"
            f" {table.num_ranks} ranks into at most {model.num_layers} stages"
        )
    return plans


def plan_of(plans: Sequence[ParallelPlan], tp: int, pp: int) -> ParallelPlan:
    """Raises ValueError unless one has this shape."""
    for plan in plans:
        if (plan.tp, plan.pp) == (tp, pp):
            return plan
    shapes = ", ".join(f"tp {each.tp} x pp {each.pp}" for each in plans)
    raise ValueError(f"tp {tp} x pp {pp} is no plan for all ranks of these hosts: {shapes} are")


def _plans(table: LinkTable, model: ModelShape) -> Iterator[ParallelPlan]:
    for tp in model.tp_sizes:
        if table.num_ranks % tp or table.num_ranks // tp > model.num_layers:
            continue
        order = _order(table, model.step.border_bytes * tp)
        ranks = [host for host in order for _ in range(host.num_ranks)]
        stages = [tuple(ranks[at : at + tp]) for at in range(0, len(ranks), tp)]
        yield _Costs(table, model, tp).plan(stages)


def _order(table: LinkTable, num_bytes: int) -> tuple[Host, ...]:
    """Returns the hosts along which a message of these bytes takes the least time."""
    hosts = table.hosts

    @cache
    def path(last: int, others: frozenset[int]) -> tuple[float, tuple[int, ...]]:
        if not others:
            return 0.0, (last,)
        found = []
        for each in others:
            seconds, before = path(each, others - {each})
            link = table.between(hosts[each], hosts[last])
            found.append((seconds + link.seconds(num_bytes), (*before, last)))
        return min(found)

    everyone = frozenset(range(len(hosts)))
    _, order = min(path(last, everyone - {last}) for last in everyone)
    return tuple(hosts[each] for each in order)


Stage = tuple[Host, ...]  # hosts of its ranks


@dataclass
class _Costs:
    table: LinkTable
    model: ModelShape
    tp: int
    seconds: float = 0.0
    host_bytes: float = 0.0
    exchanges: list[int] = field(default_factory=lambda: [0, 0])  # all, between hosts

    def plan(self, stages: Sequence[Stage]) -> ParallelPlan:
        layers = self.model.layers_of(len(stages))
        traffic = [
            self._stage(stage, num_layers, is_first=index == 0, is_last=index + 1 == len(stages))
            for index, (stage, num_layers) in enumerate(zip(stages, layers, strict=True))
        ]
        for first, second in pairwise(stages):
            self._border(first, second)
        return ParallelPlan(
            stages=tuple(tuple(host.name for host in stage) for stage in stages),
            rank_bytes=tuple(each.num_bytes for each in traffic),
            border_bytes=self.tp * self.model.step.border_bytes,
            host_bytes=self.host_bytes,
            num_exchanges=self.exchanges[0],
            num_host_exchanges=self.exchanges[1],
            exchange_s=self.seconds,
            step_s=self.model.compute_s / self.tp + self.seconds,
        )

    def _stage(self, stage: Stage, num_layers: int, *, is_first: bool, is_last: bool) -> Traffic:
        traffic = self.model.step.stage_traffic(
            self.tp, num_layers, is_first=is_first, is_last=is_last
        )
        hosts = list(dict.fromkeys(stage))
        link = _slowest([self.table.between(a, b) for a in hosts for b in hosts if a is not b])
        is_between = link is not None
        link = link or hosts[0].inside
        # Ranks gather in a ring between hosts: each crossing carries what a rank sends.
        num_latencies = EXCHANGE_LATENCIES * (self.tp - 1) if is_between else 1
        self.seconds += traffic.num_exchanges * num_latencies * link.latency_s
        self.seconds += traffic.num_bytes / link.bytes_per_s
        self._count(traffic.num_exchanges, traffic.num_bytes * len(hosts), is_between)
        return traffic

    def _border(self, first: Stage, second: Stage) -> None:
        num_bytes = self.model.step.border_bytes
        links: dict[tuple[str, str], list[Link]] = {}
        for a, b in zip(first, second, strict=True):
            links.setdefault((a.name, b.name), []).append(self.table.between(a, b))
        self.seconds += max(each[0].seconds(num_bytes * len(each)) for each in links.values())
        crossing = sum(a is not b for a, b in zip(first, second, strict=True))
        self._count(1, num_bytes * crossing, crossing > 0)

    def _count(self, num_exchanges: int, num_bytes: float, is_between: bool) -> None:
        self.exchanges[0] += num_exchanges
        if is_between:
            self.exchanges[1] += num_exchanges
            self.host_bytes += num_bytes


def _slowest(links: Sequence[Link]) -> Link | None:
    """Returns a link with the worst latency and the worst rate of these, or None without links."""
    if not links:
        return None
    return Link(max(each.latency_s for each in links), min(each.bytes_per_s for each in links))
