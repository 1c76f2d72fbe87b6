"""Makes the grammar of a request, and has it checked.

constraint, tools ──▶ plan ──checked──▶ its warnings, or an error that names the client's field
"""

from __future__ import annotations

import asyncio

import msgspec

from services.gateway.grammars.answer_grammar import GrammarPart, GrammarPlan, answer_grammar
from services.gateway.grammars.checks import GrammarChecks
from services.gateway.grammars.constraint import OutputConstraint
from services.gateway.grammars.grammar import TokenIdOf, grammar_of
from services.gateway.grammars.schema_places import located
from services.gateway.text.process_jobs import Checked, Rejected
from services.gateway.tools.families import PLAIN
from services.gateway.tools.family import Family
from services.gateway.tools.tool import ToolOptions
from shared.errors import GrammarTooComplex, InvalidRequest, Overloaded
from shared.grammar.spec import MAX_SOURCE_BYTES

MAX_CHECK_S = 1.4  # of a request's grammar, with all waiting
MAX_WARNINGS = 16


class CheckedPlan(msgspec.Struct, frozen=True):
    """`warnings`: what of the client's schemas the grammar does not enforce."""

    plan: GrammarPlan
    warnings: tuple[str, ...] = ()


class RequestGrammars:
    def __init__(self, checks: GrammarChecks, family: Family, token_id_of: TokenIdOf) -> None:
        self._checks = checks
        self._family = family
        self._token_id_of = token_id_of

    async def checked_plan(
        self,
        output: OutputConstraint | None,
        tools: ToolOptions | None,
        tenant_id: str,
        *,
        continues_text: bool = False,
    ) -> CheckedPlan | None:
        """None: the output is free. `continues_text`: it has no markup of the model's family, as no
        chat template has written the prompt. Answers within `MAX_CHECK_S`.

        Raises InvalidRequest, GrammarTooComplex, Overloaded, NoCapacity.
        """
        try:
            async with asyncio.timeout(MAX_CHECK_S):
                family = PLAIN if continues_text else self._family
                return await self._checked_plan(output, tools, tenant_id, family)
        except TimeoutError:  # a grammar that took too long itself has been rejected before
            raise Overloaded("too many grammars to check", retry_after_s=1.0) from None

    async def _checked_plan(
        self,
        output: OutputConstraint | None,
        tools: ToolOptions | None,
        tenant_id: str,
        family: Family,
    ) -> CheckedPlan | None:
        if output is not None and output.kind == "gbnf":
            output = await self._as_lark(output, tenant_id)
        try:
            plan = answer_grammar(output, tools, family, self._token_id_of)
        except RecursionError:
            raise GrammarTooComplex("a schema's references are nested too deeply") from None
        except (TypeError, AttributeError, KeyError, ValueError) as error:
            reason = "the parameters of a tool are no valid JSON Schema"
            raise InvalidRequest(f"tools: {reason}", param="tools") from error
        if plan is None:
            return None
        num_bytes = len(plan.grammar.source.encode())
        if num_bytes > MAX_SOURCE_BYTES:
            raise InvalidRequest(
                f"{plan.param}: the grammar has {num_bytes} bytes, the limit is {MAX_SOURCE_BYTES}",
                param=plan.param,
            )
        verdict = await self._checks.check(plan.grammar, tenant_id)
        if isinstance(verdict, Checked) and not verdict.warnings:
            return CheckedPlan(plan, plan.warnings[:MAX_WARNINGS])
        warnings = list(plan.warnings)
        for part in plan.parts:  # the verdicts on the parts name the fields
            found = await self._checks.check(part.grammar, tenant_id)
            if isinstance(found, Rejected):
                raise _error(found, part)
            warnings += (f"{part.param}: {located(each, part.grammar)}" for each in found.warnings)
        if isinstance(verdict, Rejected):
            raise _error(verdict, GrammarPart(plan.param, plan.grammar))
        return CheckedPlan(plan, tuple(dict.fromkeys(warnings))[:MAX_WARNINGS])

    async def _as_lark(self, output: OutputConstraint, tenant_id: str) -> OutputConstraint:
        part = GrammarPart(output.param, grammar_of(output))
        verdict = await self._checks.check(part.grammar, tenant_id)
        if isinstance(verdict, Rejected):
            raise _error(verdict, part)
        return msgspec.structs.replace(output, kind="lark", source=verdict.source)


def _error(verdict: Rejected, part: GrammarPart) -> InvalidRequest:
    kind = GrammarTooComplex if verdict.code == GrammarTooComplex.code else InvalidRequest
    reason = located(verdict.reason, part.grammar)
    return kind(f"{part.param}: {reason}", param=part.param)
