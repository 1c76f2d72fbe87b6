"""Plans from measured links: tensor parallelism stays inside hosts."""

from __future__ import annotations

import re

import msgspec
import pytest

from shared.engine.parallel.planning.links import (
    Host,
    HostLink,
    Link,
    LinkTable,
    ModelShape,
    choose_plan,
    decode_links,
)

FAST, SLOW = Link(10e-6, 100e9), Link(300e-6, 1e9)
MODEL = ModelShape(num_layers=32, hidden_size=4096, compute_s=0.04)


def hosts(*num_ranks: int, inside: Link = FAST) -> tuple[Host, ...]:
    return tuple(Host(f"host-{i}", each, inside) for i, each in enumerate(num_ranks))


def linked(links: dict[tuple[int, int], Link], *num_ranks: int) -> LinkTable:
    pairs = [
        HostLink((f"host-{first}", f"host-{second}"), link)
        for (first, second), link in links.items()
    ]
    return LinkTable(hosts(*num_ranks), tuple(pairs))


def test_two_hosts_are_two_stages_of_tensor_parallel_ranks() -> None:
    plan = choose_plan(linked({(0, 1): SLOW}, 4, 4), MODEL)
    assert (plan.tp, plan.pp, plan.hosts) == (4, 2, ("host-0", "host-1"))
    assert plan.tensor_bytes == 2 * 32 * 3 * 4096 * 4
    assert plan.stage_bytes == 4096 * 2 + 4
    sums_s = 2 * 32 * (10e-6 + 3 * 4096 * 4 / 100e9)
    assert plan.exchange_s == pytest.approx(sums_s + 300e-6 + 8196 / 1e9)
    assert plan.token_s == pytest.approx(0.04 / 4 + plan.exchange_s)
    assert str(plan).startswith("tp 4 x pp 2 on host-0 > host-1: 3,153,924 bytes and 980 µs")


def test_hosts_are_ordered_along_their_fast_links() -> None:
    table = linked({(0, 1): SLOW, (0, 2): FAST, (1, 2): FAST}, 2, 2, 2)
    assert choose_plan(table, MODEL).hosts == ("host-0", "host-2", "host-1")


def test_size_divides_the_ranks_of_every_host() -> None:
    plan = choose_plan(linked({(0, 1): SLOW}, 4, 6), MODEL)
    assert (plan.tp, plan.hosts) == (2, ("host-0",) * 2 + ("host-1",) * 3)


def test_slow_links_inside_a_host_make_stages_of_its_ranks() -> None:
    table = LinkTable(hosts(4, inside=Link(500e-6, 1e8)))
    assert (choose_plan(table, MODEL).tp, choose_plan(table, MODEL).pp) == (1, 4)


def test_heads_limit_the_size() -> None:
    model = ModelShape(32, 4096, 0.04, tp_sizes=(1, 2))
    assert choose_plan(LinkTable(hosts(8)), model).tp == 2


def test_exchange_in_bf16_halves_the_bytes_of_sums() -> None:
    model = ModelShape(32, 4096, 0.04, exchange="bf16")
    table = LinkTable(hosts(8))
    fp32, bf16 = choose_plan(table, MODEL), choose_plan(table, model)
    assert (fp32.tp, bf16.tp) == (8, 8)
    assert fp32.tensor_bytes == 2 * bf16.tensor_bytes


def test_more_stages_than_layers_are_rejected() -> None:
    model = ModelShape(num_layers=2, hidden_size=64, compute_s=0.1, tp_sizes=(1,))
    message = "hosts of [3] ranks: no tensor parallel size of [1] divides all of them with at most"
    with pytest.raises(ValueError, match=re.escape(message)):
        choose_plan(LinkTable(hosts(3)), model)


def test_link_that_was_not_measured_is_named() -> None:
    with pytest.raises(ValueError, match="between host-0 and host-1 is not in the table"):
        choose_plan(LinkTable(hosts(1, 1)), MODEL)


def test_table_survives_json() -> None:
    table = linked({(0, 1): SLOW}, 4, 4)
    assert decode_links(msgspec.json.encode(table)) == table


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not a table of links: Input data was truncated"),
        ('{"hosts": []}', "1 to 8 of different names"),
        ('{"hosts": [HOST, HOST]}', "1 to 8 of different names"),
        ('{"hosts": [HOST], "links": [{"hosts": ["a", "b"], "link": LINK}]}', "between a and b"),
        ('{"hosts": [HOST], "links": [{"hosts": ["a", "a"], "link": LINK}]}', "between a and a"),
        ('{"hosts": [HOST], "speed": 1}', "unknown field `speed`"),
        (
            '{"hosts": [{"name": "a", "num_ranks": 0, "inside": LINK}]}',
            r"`int` >= 1 - at `\$.hosts\[0\].num_ranks`",
        ),
    ],
)
def test_bad_tables_are_rejected(text: str, message: str) -> None:
    link = '{"latency_s": 0.1, "bytes_per_s": 1e9}'
    host = f'{{"name": "a", "num_ranks": 2, "inside": {link}}}'
    with pytest.raises(ValueError, match=message):
        decode_links(text.replace("HOST", host).replace("LINK", link).encode())
