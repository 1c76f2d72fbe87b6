"""Plans from links: tensor parallelism stays inside hosts."""

from __future__ import annotations

import re

import pytest

from shared.engine.parallel.links import Host, HostLink, Link, LinkTable
from shared.engine.planning.parallel_plan import (
    ModelShape,
    ParallelPlan,
    all_plans,
    choose_plan,
    plan_of,
)
from shared.engine.planning.step_bytes import StepShape

FAST, SLOW = Link(10e-6, 100e9), Link(300e-6, 1e9)
HIDDEN, VOCABULARY = 4096, 32000


def model_of(num_layers: int = 32, tp_sizes: tuple[int, ...] = (1, 2, 4, 8)) -> ModelShape:
    def layers_of(num_stages: int) -> list[int]:
        few, more = divmod(num_layers, num_stages)
        return [few + (stage < more) for stage in range(num_stages)]

    return ModelShape(
        num_layers=num_layers,
        step=StepShape(hidden_size=HIDDEN, vocab_size=VOCABULARY),
        compute_s=0.04,
        layers_of=layers_of,
        tp_sizes=tp_sizes,
    )


MODEL = model_of()


def hosts(*num_ranks: int, inside: Link = FAST) -> tuple[Host, ...]:
    return tuple(Host(f"host-{i}", each, inside) for i, each in enumerate(num_ranks))


def linked(links: dict[tuple[int, int], Link], *num_ranks: int) -> LinkTable:
    pairs = [
        HostLink((f"host-{first}", f"host-{second}"), link)
        for (first, second), link in links.items()
    ]
    return LinkTable(hosts(*num_ranks), tuple(pairs))


def chosen(table: LinkTable, model: ModelShape = MODEL) -> ParallelPlan:
    return choose_plan(all_plans(table, model))


def test_two_hosts_are_two_stages_of_tensor_parallel_ranks() -> None:
    plan = chosen(linked({(0, 1): SLOW}, 4, 4))
    assert (plan.tp, plan.pp, plan.hosts) == (4, 2, ("host-0", "host-1"))
    sums = 2 * 16 * 3 * HIDDEN * 4
    embedding, logits = 3 * HIDDEN * 2, 3 * VOCABULARY // 4 * 4
    assert plan.rank_bytes == (sums + embedding, sums + logits)
    assert plan.border_bytes == plan.host_bytes == 4 * HIDDEN * 2
    assert (plan.num_exchanges, plan.num_host_exchanges) == (2 * 32 + 2 + 1, 1)
    inside_s = (2 * 32 + 2) * 10e-6 + sum(plan.rank_bytes) / 100e9
    assert plan.exchange_s == pytest.approx(inside_s + 300e-6 + 4 * HIDDEN * 2 / 1e9)
    assert plan.step_s == pytest.approx(0.04 / 4 + plan.exchange_s)


def test_alternatives_show_what_tensor_parallelism_across_hosts_would_send() -> None:
    plans = all_plans(linked({(0, 1): SLOW}, 4, 4), MODEL)
    assert [(each.tp, each.pp) for each in plans] == [(1, 8), (2, 4), (4, 2), (8, 1)]
    across = plan_of(plans, 8, 1)
    assert across.spans_hosts and across.hosts == ("host-0+host-1",)
    assert across.num_host_exchanges == across.num_exchanges == 2 * 32 + 2
    latencies_s = 2 * 7 * across.num_exchanges * 300e-6  # a ring of eight ranks over Gloo
    assert across.exchange_s == pytest.approx(latencies_s + across.rank_bytes[0] / 1e9)
    assert across.host_bytes > 100 * plan_of(plans, 4, 2).host_bytes
    with pytest.raises(ValueError, match="tp 2 x pp 2 is no plan for all ranks of these hosts"):
        plan_of(plans, 2, 2)


def test_hosts_are_ordered_along_their_fast_links() -> None:
    table = linked({(0, 1): SLOW, (0, 2): FAST, (1, 2): FAST}, 2, 2, 2)
    assert chosen(table).hosts == ("host-0", "host-2", "host-1")


def test_fast_links_between_hosts_are_not_crossed_by_sums_either() -> None:
    plans = all_plans(linked({(0, 1): Link(1e-6, 100e9)}, 4, 4), MODEL)
    assert plan_of(plans, 8, 1).step_s < plan_of(plans, 4, 2).step_s
    assert choose_plan(plans) is plan_of(plans, 4, 2)


def test_size_divides_the_ranks_of_every_host() -> None:
    plan = chosen(linked({(0, 1): SLOW}, 4, 6))
    assert (plan.tp, plan.hosts) == (2, ("host-0",) * 2 + ("host-1",) * 3)


def test_slow_links_inside_a_host_make_stages_of_its_ranks() -> None:
    plan = chosen(LinkTable(hosts(4, inside=Link(500e-6, 1e8))))
    assert (plan.tp, plan.pp) == (1, 4)


def test_heads_limit_the_size() -> None:
    assert chosen(LinkTable(hosts(8)), model_of(tp_sizes=(1, 2))).tp == 2


def test_more_stages_than_layers_are_rejected() -> None:
    message = "hosts of [3] ranks: no tensor parallel size of [1] divides 3 ranks into at most 2"
    with pytest.raises(ValueError, match=re.escape(message)):
        all_plans(LinkTable(hosts(3)), model_of(2, (1,)))


def test_eight_hosts_are_planned_at_once() -> None:
    links = {(b, a): Link(1e-3 + a * b * 1e-6, 1e9) for a in range(8) for b in range(a)}
    assert chosen(linked(links, *[2] * 8)).pp == 8
