"""Grammars of clients, tried in the processes that check them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from services.gateway.grammars import checks as checks_module
from services.gateway.grammars.checks import CHECK_PROCESS, GrammarChecks
from services.gateway.grammars.grammar import Grammar
from services.gateway.text.preparation_pool import PreparationPool
from services.gateway.text.process_jobs import Checked, CheckJob, ProcessSetup, Rejected
from shared.errors import Overloaded
from tests.services.gateway.model_dir import EOS_TOKEN_ID, write_model_dir

# A grammar that compiles at once; its first mask takes a second.
SLOW = "^(a{1000}){1000}$"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_dir(tmp_path_factory.mktemp("models") / "tiny")


class PooledChecks(GrammarChecks):
    def __init__(self, directory: Path) -> None:
        setup = ProcessSetup(None, str(directory), (EOS_TOKEN_ID,))
        self.pool = PreparationPool(setup, num_processes=2, module=CHECK_PROCESS, max_wait_s=60.0)
        super().__init__(self.pool)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def checks(directory: Path) -> AsyncIterator[PooledChecks]:
    started = PooledChecks(directory)
    await started.pool.start()
    yield started
    await started.close()


pytestmark = pytest.mark.asyncio(loop_scope="module")


def schema(**fields: object) -> Grammar:
    return Grammar("json_schema", json.dumps({**fields, "x-guidance": {"lenient": True}}))


HOSTILE = {
    "slow first mask": Grammar("regex", SLOW),
    "slow third token": Grammar("regex", "^(.{1,5000}){1,500}$"),
    "unclosed class": Grammar("regex", "["),
    "look-ahead": Grammar("regex", "a(?=b)"),
    "reference to a group": Grammar("regex", r"(a)\1"),
    "no regex": Grammar("regex", "*"),
    "endless reference": schema(**{"$ref": "#"}),
    "reference loop": schema(
        **{"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}
    ),
    "remote reference": schema(**{"$ref": "http://127.0.0.1:1/schema.json"}),
    "local file": schema(**{"$ref": "file:///etc/passwd"}),
    "missing reference": schema(**{"$ref": "#/$defs/missing"}),
    "no value": schema(enum=[]),
    "contradiction": schema(allOf=[{"type": "string"}, {"type": "integer"}]),
    "bounds": schema(type="array", minItems=3, maxItems=2),
    "unknown type": schema(type="text"),
    "list of properties": schema(properties=[1]),
    "bad pattern": schema(type="string", pattern="["),
    "slow pattern": schema(type="string", pattern=SLOW),
    "allOf bomb": schema(
        allOf=[
            {"anyOf": [{"type": "string", "pattern": f"{a}.{{{b},900}}"} for a in "abcdefgh"]}
            for b in range(1, 12)
        ]
    ),
    "no schema": Grammar("json_schema", "[1]"),
    "no JSON": Grammar("json_schema", "{"),
    "no start": Grammar("lark", 'other: "a"'),
    "unknown rule": Grammar("lark", "start: missing"),
    "endless rule": Grammar("lark", "start: start"),
    "unreachable end": Grammar("lark", 'start: "a" start'),
    "nested parentheses": Grammar("lark", f"start: {'(' * 9000}'a'{')' * 9000}"),
    "unknown token": Grammar("lark", "start: <[999999]>"),
    "NUL": Grammar("lark", "start: \0"),
    "broken GBNF": Grammar("gbnf", "root ::= ::="),
    "GBNF without root": Grammar("gbnf", 'a ::= "b"'),
    "nested GBNF": Grammar("gbnf", f"root ::= {'(' * 9000}"),
}


@pytest.mark.parametrize("name", HOSTILE)
async def test_hostile_grammar_is_rejected(checks: PooledChecks, name: str) -> None:
    verdict = await checks.check(HOSTILE[name], name)
    assert isinstance(verdict, Rejected)
    assert verdict.reason and "<state>" not in verdict.reason and "|" not in verdict.reason
    assert len(verdict.reason) < 500


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar("regex", "[0-9]{3}-[a-z]+"),
        Grammar("lark", 'start: "yes" | "no"'),
        Grammar("json_schema", "{}"),
        schema(type="object", properties={"name": {"type": "string"}}, required=["name"]),
        schema(
            **{"$ref": "#/$defs/n", "$defs": {"n": {"anyOf": [{"type": "null"}, {"$ref": "#"}]}}}
        ),
        schema(enum=[f"{number:06}" for number in range(1000)]),
    ],
)
async def test_usual_grammar_is_accepted(checks: PooledChecks, grammar: Grammar) -> None:
    assert await checks.check(grammar, "t") == Checked("", [])


async def test_gbnf_becomes_lark(checks: PooledChecks) -> None:
    verdict = await checks.check(Grammar("gbnf", 'root ::= "a" b\nb ::= [0-9]+'), "t")
    assert isinstance(verdict, Checked) and "start:" in verdict.source
    assert await checks.check(Grammar("lark", verdict.source), "t") == Checked("", [])


async def test_warnings_name_ignored_keywords(checks: PooledChecks) -> None:
    verdict = await checks.check(schema(type="array", uniqueItems=True), "t")
    assert isinstance(verdict, Checked) and "uniqueItems" in verdict.warnings[0]


async def test_verdict_is_cached(checks: PooledChecks, monkeypatch: pytest.MonkeyPatch) -> None:
    grammar = Grammar("regex", "cached")
    assert await checks.check(grammar, "t") == Checked("", [])

    async def never(*_: object) -> None:
        pytest.fail("a known grammar is checked again")

    monkeypatch.setattr(checks.pool, "run", never)
    assert await checks.check(grammar, "t") == Checked("", [])


async def test_verdict_of_a_tenant_is_no_faster_for_another(
    checks: PooledChecks, monkeypatch: pytest.MonkeyPatch
) -> None:
    grammar = Grammar("regex", "own")
    await checks.check(grammar, "t")
    ran = []
    run = checks.pool.run
    monkeypatch.setattr(checks.pool, "run", lambda *args: ran.append(args[0]) or run(*args))
    for tenant_id in ("t", "other", "other"):
        assert await checks.check(grammar, tenant_id) == Checked("", [])
    assert ran == ["other"]


async def test_tenant_of_many_grammars_pushes_out_no_others(
    checks: PooledChecks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks_module, "MAX_TENANT_VERDICTS", 2)
    monkeypatch.setattr(checks, "_verdicts", {})
    await checks.check(Grammar("regex", "rare"), "quiet")
    for source in ("a", "b", "c", "d"):
        await checks.check(Grammar("regex", source), "busy")
    ran = []
    run = checks.pool.run
    monkeypatch.setattr(checks.pool, "run", lambda *args: ran.append(args[1].source) or run(*args))
    await checks.check(Grammar("regex", "rare"), "quiet")
    for source in ("d", "c", "a"):
        await checks.check(Grammar("regex", source), "busy")
    assert ran == ["a"]


async def test_least_recently_used_verdict_is_forgotten(
    checks: PooledChecks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks_module, "MAX_VERDICTS", 2)
    monkeypatch.setattr(checks, "_verdicts", {})
    monkeypatch.setattr(checks, "_num_verdicts", 0)
    for source in ("a", "b", "a", "c"):
        await checks.check(Grammar("regex", source), "t")
    ran = []
    run = checks.pool.run
    monkeypatch.setattr(checks.pool, "run", lambda *args: ran.append(args[1].source) or run(*args))
    for source in ("a", "b"):
        await checks.check(Grammar("regex", source), "t")
    assert ran == ["b"]


async def test_equal_checks_share_one_job(
    checks: PooledChecks, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = []
    run = checks.pool.run
    monkeypatch.setattr(checks.pool, "run", lambda *args: ran.append(args) or run(*args))
    grammar = Grammar("regex", "shared")
    first = asyncio.create_task(checks.check(grammar, "t"))
    await asyncio.sleep(0)
    second = asyncio.create_task(checks.check(grammar, "t"))
    await asyncio.sleep(0)
    first.cancel()  # ends neither the check nor its process
    assert await second == Checked("", [])
    assert len(ran) == 1


async def test_hostile_tenant_delays_no_other(directory: Path) -> None:
    """Ten seconds of grammars of one tenant wait, and another's is checked at once."""
    checks = PooledChecks(directory)
    hostile = [
        asyncio.create_task(checks.check(Grammar("regex", f"{number}{SLOW[1:]}"), "hostile"))
        for number in range(10)
    ]
    await asyncio.sleep(0)
    assert await checks.check(Grammar("regex", "other"), "other") == Checked("", [])
    assert sum(each.done() for each in hostile) <= 1
    await checks.close()
    assert await asyncio.gather(*hostile, return_exceptions=True)


async def test_wait_is_bounded(directory: Path) -> None:
    setup = ProcessSetup(None, str(directory), (EOS_TOKEN_ID,))
    pool = PreparationPool(setup, num_processes=1, module=CHECK_PROCESS, max_wait_s=0.05)
    checks = GrammarChecks(pool)
    slow = asyncio.create_task(checks.check(Grammar("regex", SLOW), "t"))
    await asyncio.sleep(0)
    with pytest.raises(Overloaded):
        await checks.check(Grammar("regex", "a"), "t")
    slow.cancel()
    await checks.close()


@pytest.mark.parametrize("grows", [True, False])
async def test_processes_start_when_others_are_busy(directory: Path, grows: bool) -> None:
    """One of a large vocabulary takes 0.5 s of CPU and 100 MB."""
    setup = ProcessSetup(None, str(directory), (EOS_TOKEN_ID,))
    pool = PreparationPool(
        *(setup,), num_processes=3, module=CHECK_PROCESS, spare_delay_s=0.0, grows=grows
    )

    async def alive(count: int) -> None:
        async with asyncio.timeout(10):
            while pool._is_filling:
                await asyncio.sleep(0.01)
        assert pool._num_alive() == count

    await pool.start()
    await alive(2 if grows else 4)
    replies = await asyncio.gather(*(pool.run(each, CheckJob("regex", "a+")) for each in "abc"))
    assert replies == [Checked("", [])] * 3
    assert len(pool.process_ids) == 3
    await alive(4)
    await pool.close()
