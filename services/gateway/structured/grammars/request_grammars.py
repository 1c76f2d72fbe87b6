"""Checks the grammar of a request, with errors that name the client's field."""

from __future__ import annotations

import asyncio

import msgspec

from services.gateway.structured.grammars.checks import GrammarChecks
from services.gateway.structured.grammars.constraint import OutputConstraint
from services.gateway.structured.grammars.grammar_request import CheckedPlan, encoded_request
from services.gateway.structured.tools.tool import ToolOptions
from services.gateway.text.process_jobs import JobRejected, ProcessSetup
from shared.errors import GrammarTooComplex, InvalidRequest, Overloaded

MAX_CHECK_S = 1.4  # seconds for a request's grammar, all waiting included

_decoder = msgspec.msgpack.Decoder(CheckedPlan)


class RequestGrammars:
    """The checks of one model, described by `setup`. All models share `checks`."""

    def __init__(self, checks: GrammarChecks, setup: ProcessSetup) -> None:
        self._checks = checks
        self._setup = setup

    async def checked_plan(
        self,
        output: OutputConstraint | None,
        tools: ToolOptions | None,
        tenant_id: str,
        *,
        continues_text: bool = False,
        is_retained: bool = True,
    ) -> CheckedPlan | None:
        """Returns the plan within MAX_CHECK_S, or None if the output is unconstrained.
        `continues_text` means that no chat template wrote the prompt, so the output has no markup
        of the model's family. A plan that is not retained is made again for the next request.
        Raises InvalidRequest, GrammarTooComplex, Overloaded and NoCapacity.
        """
        if output is None and (tools is None or tools.choice == "none"):
            return None
        request = encoded_request(output, tools, continues_text=continues_text)
        try:
            async with asyncio.timeout(MAX_CHECK_S):
                verdict = await self._checks.check(
                    request, tenant_id, self._setup, is_retained=is_retained
                )
        except TimeoutError:  # slow grammars have been rejected before this
            raise Overloaded("too many grammars to check", retry_after_s=1.0) from None
        if isinstance(verdict, JobRejected):
            raise _error(verdict, "tools" if output is None else output.param)
        return _decoder.decode(verdict.plan) if verdict.plan else None


def _error(verdict: JobRejected, param: str) -> InvalidRequest:
    """Returns the error of a rejection. `param` is for an error without a field, such as that of a
    killed process.
    """
    kind = GrammarTooComplex if verdict.code == GrammarTooComplex.code else InvalidRequest
    if verdict.param is not None:
        return kind(verdict.reason, param=verdict.param)
    return kind(f"{param}: {verdict.reason}", param=param)
