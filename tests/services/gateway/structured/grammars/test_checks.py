"""Grammars of clients, tried in the processes that check them."""

from __future__ import annotations

import asyncio
import json
import os
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import msgspec
import pytest
import pytest_asyncio

from services.gateway.preparation.preparation_pool import PreparationPool
from services.gateway.schemas.graph import SchemaGraph
from services.gateway.structured.grammars import answer_grammar as answer_grammar_module
from services.gateway.structured.grammars.check_process import SLOW_NICENESS, checked_in_thread
from services.gateway.structured.grammars.checks import (
    CHECK_PROCESS,
    MAX_TENANT_VERDICTS,
    MAX_VERDICTS,
    GrammarChecks,
)
from services.gateway.structured.grammars.constraint import ConstraintKind, OutputConstraint
from services.gateway.structured.grammars.grammar_request import CheckedPlan, encoded_request
from services.gateway.structured.grammars.plan_checks import PlanChecks
from services.gateway.structured.grammars.request_grammars import RequestGrammars
from services.gateway.structured.grammars.tenant_cache import Bounds
from services.gateway.structured.tools.families import FAMILIES, PLAIN
from services.gateway.structured.tools.family import Family
from services.gateway.structured.tools.tool import CustomFormat, Tool, ToolChoice, ToolOptions
from services.gateway.text.process_jobs import (
    Checked,
    CheckJob,
    JobRejected,
    ProcessSetup,
    Reply,
    over_limit,
)
from shared.errors import GrammarTooComplex, InvalidRequest, Overloaded
from tests.support.services.model_dir import EOS_TOKEN_ID, write_model_dir
from tests.support.waiting import until

# A grammar that compiles at once; its first mask takes a second.
SLOW = "^(a{1000}){1000}$"
TREE = {
    "type": "object",
    "properties": {"children": {"type": "array", "items": {"$ref": "#"}}},
    "additionalProperties": False,
}


def tree_tool(number: int) -> Tool:
    return Tool(name=f"tree{number}", parameters=TREE, param=f"tools[{number}]")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_dir(tmp_path_factory.mktemp("models") / "tiny")


def setup_of(directory: Path, family: Family = PLAIN) -> ProcessSetup:
    encoded = msgspec.msgpack.encode(family)
    return ProcessSetup(None, str(directory), (EOS_TOKEN_ID,), encoded, {"<tool_call>": 5})


class PooledChecks(GrammarChecks):
    def __init__(
        self,
        directory: Path,
        family: Family = PLAIN,
        bounds: Bounds = MAX_VERDICTS,
        of_tenant: Bounds = MAX_TENANT_VERDICTS,
    ) -> None:
        self.setup = setup_of(directory, family)
        self.pool = PreparationPool(
            self.setup, num_processes=2, module=CHECK_PROCESS, max_wait_s=60.0
        )
        super().__init__(self.pool, bounds=bounds, of_tenant=of_tenant)

    async def check(
        self,
        request: bytes,
        tenant_id: str,
        setup: ProcessSetup | None = None,
        *,
        is_retained: bool = True,
    ) -> Checked | JobRejected:
        setup = self.setup if setup is None else setup
        return await super().check(request, tenant_id, setup, is_retained=is_retained)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def checks(directory: Path) -> AsyncIterator[PooledChecks]:
    started = PooledChecks(directory)
    await started.pool.start()
    yield started
    await started.close()


pytestmark = pytest.mark.asyncio(loop_scope="module")


def request(
    kind: ConstraintKind, source: str, tools: tuple[Tool, ...] = (), choice: ToolChoice = "auto"
) -> bytes:
    options = ToolOptions(tools=tools, choice=choice) if tools else None
    output = OutputConstraint(kind=kind, source=source) if source else None
    return encoded_request(output, options, continues_text=False)


def schema(**fields: object) -> bytes:
    return request("json_schema", json.dumps(fields))


def plan_of(verdict: object) -> CheckedPlan:
    assert isinstance(verdict, Checked), verdict
    return msgspec.msgpack.decode(verdict.plan, type=CheckedPlan)


UNWRITABLE = 'start: "a" start{1,2} | "b"'
HOSTILE = {
    "slow first mask": request("regex", SLOW),
    "slow third token": request("regex", "^(.{1,5000}){1,500}$"),
    "unclosed class": request("regex", "["),
    "look-ahead": request("regex", "a(?=b)"),
    "reference to a group": request("regex", r"(a)\1"),
    "no regex": request("regex", "*"),
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
    "no schema": request("json_schema", "[1]"),
    "no JSON": request("json_schema", "{"),
    "no start": request("lark", 'other: "a"'),
    "unknown rule": request("lark", "start: missing"),
    "endless rule": request("lark", "start: start"),
    "rule without a repetition": request("lark", UNWRITABLE),
    "GBNF without a repetition": request("gbnf", 'root ::= "a" root{1,2} | "b"'),
    "unreachable end": request("lark", 'start: "a" start'),
    "nested parentheses": request("lark", f"start: {'(' * 9000}'a'{')' * 9000}"),
    "unknown token": request("lark", "start: <[999999]>"),
    "NUL": request("lark", "start: \0"),
    "broken GBNF": request("gbnf", "root ::= ::="),
    "GBNF without root": request("gbnf", 'a ::= "b"'),
    "nested GBNF": request("gbnf", f"root ::= {'(' * 9000}"),
}


@pytest.mark.parametrize("name", HOSTILE)
async def test_hostile_grammar_is_rejected(checks: PooledChecks, name: str) -> None:
    verdict = await checks.check(HOSTILE[name], name)
    assert isinstance(verdict, JobRejected)
    assert verdict.reason and "<state>" not in verdict.reason and "|" not in verdict.reason
    assert len(verdict.reason) < 500


@pytest.mark.parametrize(
    "grammar",
    [
        request("regex", "[0-9]{3}-[a-z]+"),
        request("lark", 'start: "yes" | "no"'),
        request("json_schema", "{}"),
        schema(type="object", properties={"name": {"type": "string"}}, required=["name"]),
        schema(
            **{"$ref": "#/$defs/n", "$defs": {"n": {"anyOf": [{"type": "null"}, {"$ref": "#"}]}}}
        ),
        schema(enum=[f"{number:06}" for number in range(1000)]),
    ],
)
async def test_usual_grammar_is_accepted(checks: PooledChecks, grammar: bytes) -> None:
    assert plan_of(await checks.check(grammar, "t")).warnings == ()


async def test_gbnf_becomes_lark(checks: PooledChecks) -> None:
    found = plan_of(await checks.check(request("gbnf", 'root ::= "a" b\nb ::= [0-9]+'), "t"))
    assert found.plan.grammar.kind == "lark" and "start:" in found.plan.grammar.source
    assert await checks.check(request("lark", found.plan.grammar.source), "t")


async def test_warnings_name_ignored_keywords(checks: PooledChecks) -> None:
    found = plan_of(await checks.check(schema(type="array", uniqueItems=True), "t"))
    assert "uniqueItems" in found.warnings[0] and "at /uniqueItems" in found.warnings[0]


async def test_verdict_is_cached(checks: PooledChecks, monkeypatch: pytest.MonkeyPatch) -> None:
    grammar = request("regex", "cached")
    first = await checks.check(grammar, "t")

    async def never(*_: object) -> None:
        pytest.fail("a known grammar is checked again")

    monkeypatch.setattr(checks.pool, "run", never)
    assert await checks.check(grammar, "t") == first


async def test_verdict_of_a_tenant_is_no_faster_for_another(
    checks: PooledChecks, monkeypatch: pytest.MonkeyPatch
) -> None:
    grammar = request("regex", "own")
    await checks.check(grammar, "t")
    ran = []
    run = checks.pool.run
    monkeypatch.setattr(checks.pool, "run", lambda *args: ran.append(args[0]) or run(*args))
    for tenant_id in ("t", "other", "other"):
        assert plan_of(await checks.check(grammar, tenant_id))
    assert ran == ["other"]


async def test_equal_checks_share_one_job(
    checks: PooledChecks, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = []
    run = checks.pool.run
    monkeypatch.setattr(checks.pool, "run", lambda *args: ran.append(args) or run(*args))
    grammar = request("regex", "shared")
    first = asyncio.create_task(checks.check(grammar, "t"))
    await asyncio.sleep(0)
    second = asyncio.create_task(checks.check(grammar, "t"))
    await asyncio.sleep(0)
    first.cancel()  # ends neither the check nor its process
    assert plan_of(await second)
    assert len(ran) == 1


async def test_no_schema_is_read_in_the_gateway(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop, which all streams share, would stand still meanwhile."""

    def refused(*_: object) -> None:
        pytest.fail("a schema's alternatives are computed in the gateway's process")

    monkeypatch.setattr(SchemaGraph, "__init__", refused)
    monkeypatch.setattr(answer_grammar_module, "answer_grammar", refused)
    checks = PooledChecks(directory, FAMILIES["qwen_xml"])
    ran = []
    run = checks.pool.run
    monkeypatch.setattr(checks.pool, "run", lambda *args: ran.append(args) or run(*args))
    grammars = RequestGrammars(checks, checks.setup)
    tools = ToolOptions(tools=(tree_tool(0), tree_tool(1)), choice="required")
    output = OutputConstraint(kind="json_schema", source=json.dumps(TREE))
    for given in ((None, tools), (output, None), (None, tools), (output, None)):
        found = await grammars.checked_plan(*given, "t")
        assert found is not None and found.plan.grammar.source
    assert len(ran) == 2  # each is planned once
    for _ in range(2):
        assert await grammars.checked_plan(output, None, "quiet", is_retained=False)
    assert len(ran) == 4 and b"quiet" not in repr(checks._verdicts._tenants).encode()
    del ran[2:]
    assert (
        await grammars.checked_plan(None, msgspec.structs.replace(tools, choice="none"), "t")
        is None
    )
    assert len(ran) == 2
    await checks.close()


async def test_nothing_stays_of_a_tenant_that_is_forgotten(
    checks: PooledChecks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not of a check that runs meanwhile, nor after a request of zero retention."""
    grammars = RequestGrammars(checks, checks.setup)
    output = OutputConstraint(kind="json_schema", source=json.dumps(TREE))

    async def check(*, is_retained: bool = True) -> None:
        assert await grammars.checked_plan(output, None, "gone", is_retained=is_retained)

    await check()
    assert "gone" in checks._verdicts._tenants
    checks.forget("gone")
    assert "gone" not in checks._verdicts._tenants
    with monkeypatch.context() as patched:
        run = checks.pool.run
        patched.setattr(checks.pool, "run", lambda *args: checks.forget("gone") or run(*args))
        await check()
    assert "gone" not in checks._verdicts._tenants
    await check()
    await check(is_retained=False)
    assert "gone" not in checks._verdicts._tenants


async def test_errors_name_the_tool(directory: Path) -> None:
    checks = PooledChecks(directory, FAMILIES["hermes"])
    grammars = RequestGrammars(checks, checks.setup)
    odd = Tool(name="odd", schema_param="tools[1].parameters", parameters={"type": "text"})
    custom = CustomFormat(syntax="lark", definition=UNWRITABLE)
    endless = msgspec.structs.replace(odd, custom=custom)
    for offered in ((odd,), (endless,), (tree_tool(0), odd, tree_tool(2))):
        options = ToolOptions(tools=offered, choice="required")
        with pytest.raises(InvalidRequest, match=r"^tools\[1\]\.parameters: ") as raised:
            await grammars.checked_plan(None, options, "t")
        assert raised.value.param == "tools[1].parameters"
    ignored = Tool(
        name="i",
        schema_param="tools[2].parameters",
        parameters={"properties": {"a": {"not": {"type": "null"}}}},
    )
    options = ToolOptions(tools=(tree_tool(0), ignored), choice="required")
    found = await grammars.checked_plan(None, options, "t")
    assert found is not None
    assert found.warnings and all(each.startswith("tools[2].") for each in found.warnings)
    await checks.close()


async def test_verdicts_are_of_a_model(checks: PooledChecks) -> None:
    """The same processes check the grammars of all models, each with its own vocabulary."""
    grammar = request("regex", "of two models")
    assert plan_of(await checks.check(grammar, "t"))
    other = msgspec.structs.replace(checks.setup, eos_token_ids=(), key="other")
    refused = await checks.check(grammar, "t", other)
    assert isinstance(refused, JobRejected) and "cannot be constrained" in refused.reason
    assert plan_of(await checks.check(grammar, "u"))


async def test_limit_of_a_process_names_the_field(checks: PooledChecks) -> None:
    """A process that was killed says nothing of its request."""

    async def killed(_: str, setup: ProcessSetup, job: CheckJob) -> Reply:
        return over_limit(job)

    pool = cast(PreparationPool, SimpleNamespace(run=killed))
    output = OutputConstraint(kind="regex", source="a", param="guided_regex")
    with pytest.raises(GrammarTooComplex, match=r"^guided_regex: ") as raised:
        await RequestGrammars(GrammarChecks(pool), checks.setup).checked_plan(output, None, "t")
    assert raised.value.param == "guided_regex"


async def test_checks_run_at_a_low_priority(directory: Path) -> None:
    setup = setup_of(directory)
    pool = PreparationPool(setup, num_processes=1, module=CHECK_PROCESS, niceness=3)
    await pool.start()
    (pid,) = pool.process_ids
    own = os.getpriority(os.PRIO_PROCESS, 0)
    assert os.getpriority(os.PRIO_PROCESS, pid) == min(19, own + 3)
    await pool.close()


class SlowChecks:
    """Takes more than the usual CPU time. Records the priority at its begin and end."""

    def __init__(self) -> None:
        self.priorities: list[int] = []

    def check(self, _: object) -> None:
        self._record()
        began_s, lower = time.thread_time(), self.priorities[0] + SLOW_NICENESS
        while self._priority() != lower and time.thread_time() - began_s < 5:
            sum(range(1000))
        self._record()

    def _priority(self) -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    def _record(self) -> None:
        self.priorities.append(self._priority())


async def test_long_check_yields_the_processor() -> None:
    own = os.getpriority(os.PRIO_PROCESS, 0)
    job = CheckJob(request("regex", "a"))
    for _ in range(2):  # the next job has the usual priority again
        slow = SlowChecks()
        assert checked_in_thread(job, cast(PlanChecks, slow)) == Checked(b"")
        assert slow.priorities == [own, own + SLOW_NICENESS]


async def test_panic_of_a_check_ends_no_process() -> None:
    def panic(_: object) -> None:
        raise BaseException("native code panics with one")

    checks = cast(PlanChecks, SimpleNamespace(check=panic))
    reply = checked_in_thread(CheckJob(request("regex", "a")), checks)
    assert reply == JobRejected("invalid grammar: BaseException", None)


async def test_hostile_tenant_delays_no_other(directory: Path) -> None:
    """Ten seconds of grammars of one tenant wait, and another's is checked at once."""
    checks = PooledChecks(directory)
    hostile = [
        asyncio.create_task(checks.check(request("regex", f"{number}{SLOW[1:]}"), "hostile"))
        for number in range(10)
    ]
    await asyncio.sleep(0)
    assert plan_of(await checks.check(request("regex", "other"), "other"))
    assert sum(each.done() for each in hostile) <= 1
    await checks.close()
    assert await asyncio.gather(*hostile, return_exceptions=True)


async def test_wait_is_bounded(directory: Path) -> None:
    setup = setup_of(directory)
    pool = PreparationPool(setup, num_processes=1, module=CHECK_PROCESS, max_wait_s=0.05)
    checks = GrammarChecks(pool)
    slow = asyncio.create_task(checks.check(request("regex", SLOW), "t", setup))
    await asyncio.sleep(0)
    with pytest.raises(Overloaded):
        await checks.check(request("regex", "a"), "t", setup)
    slow.cancel()
    await checks.close()


@pytest.mark.parametrize("grows", [True, False])
async def test_processes_start_when_others_are_busy(directory: Path, grows: bool) -> None:
    """One of a large vocabulary takes 0.5 s of CPU and 100 MB."""
    setup = setup_of(directory)
    pool = PreparationPool(
        setup, num_processes=3, module=CHECK_PROCESS, spare_delay_s=0.0, grows=grows
    )

    async def alive(count: int) -> None:
        await until(lambda: not pool._is_filling)
        assert pool._num_alive() == count

    await pool.start()
    await alive(2 if grows else 4)
    job = CheckJob(request("regex", "a+"))
    for reply in await asyncio.gather(*(pool.run(each, setup, job) for each in "abc")):
        assert plan_of(reply)
    assert len(pool.process_ids) == 3
    await alive(4)
    await pool.close()
