"""Logs the links that ranks measured as they joined, and a better plan for them if there is one."""

from __future__ import annotations

from collections.abc import Sequence

import structlog

from shared.engine.model_config.model_config import ModelConfig
from shared.engine.parallel.links import SHARED_MEMORY, Host, HostLink, LinkTable, RankLink
from shared.engine.parallel.mesh_shape import MeshShape
from shared.engine.planning.model_shape import model_shape
from shared.engine.planning.parallel_plan import (
    ParallelPlan,
    all_plans,
    choose_plan,
    plan_of,
)
from shared.kv_layout import ITEM_BYTES
from shared.numerics import exchange_of

log = structlog.get_logger(__name__)


def link_table(hosts: Sequence[str], links: Sequence[RankLink]) -> LinkTable:
    """Returns the table of links between hosts. `hosts` names each rank's host."""
    inside = {hosts[each.first]: each.link for each in links if _is_inside(hosts, each)}
    names = list(dict.fromkeys(hosts))
    found = [Host(name, hosts.count(name), inside.get(name, SHARED_MEMORY)) for name in names]
    between = [
        HostLink((hosts[each.first], hosts[each.second]), each.link)
        for each in links
        if not _is_inside(hosts, each)
    ]
    return LinkTable(tuple(found), tuple(between))


def report_links(
    config: ModelConfig,
    shape: MeshShape,
    hosts: Sequence[str],
    links: Sequence[RankLink],
    *,
    dtype: str,
    activations: str,
) -> ParallelPlan:
    """Returns the plan that the measured links would choose for a step of one token."""
    for each in links:
        log.info(
            "rank_link_measured",
            ranks=(each.first, each.second),
            hosts=(hosts[each.first], hosts[each.second]),
            latency_us=round(each.link.latency_s * 1e6, 1),
            mbytes_per_s=round(each.link.bytes_per_s / 1e6),
        )
    table = link_table(hosts, links)
    model = model_shape(
        config,
        item_bytes=ITEM_BYTES[dtype],
        num_tokens=1,
        exchange=exchange_of(activations),
        rank_bytes_per_s=table.rank_bytes_per_s,
    )
    plans = all_plans(table, model)
    asked, chosen = plan_of(plans, shape.tp, shape.pp), choose_plan(plans)
    if asked is not chosen:
        log.info("parallel_plan_differs", asked=_named(asked), planned=_named(chosen))
    return chosen


def _named(plan: ParallelPlan) -> str:
    return f"tp {plan.tp} x pp {plan.pp}, {plan.step_s * 1e3:.3g} ms a step"


def _is_inside(hosts: Sequence[str], link: RankLink) -> bool:
    return hosts[link.first] == hosts[link.second]
