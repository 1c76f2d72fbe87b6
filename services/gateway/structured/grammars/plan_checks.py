"""Plans and tries the grammar of a request: the work of a check process.

A client's grammar may take seconds or gigabytes, at once or at its hundredth token, and so may the
alternatives of a schema, which the grammars of typed calls need.

request ──▶ plan ──compiled, walked──▶ its warnings, or an error that names the client's field
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from random import Random

import msgspec

from services.gateway.structured.grammars.answer_grammar import (
    GrammarPart,
    GrammarPlan,
    answer_grammar,
)
from services.gateway.structured.grammars.constraint import OutputConstraint
from services.gateway.structured.grammars.grammar import Grammar, TokenIdOf, grammar_of
from services.gateway.structured.grammars.grammar_request import CheckedPlan, GrammarRequest
from services.gateway.structured.grammars.schema_places import located
from services.gateway.structured.tools.families import PLAIN
from services.gateway.structured.tools.family import Family
from services.gateway.structured.tools.tool import ToolOptions
from services.gateway.text.process_jobs import CHECK_TIMEOUT
from shared.errors import GrammarTooComplex, HearthError, InvalidRequest
from shared.grammar.gbnf import lark_of
from shared.grammar.matcher import NO_OUTPUT, Matcher
from shared.grammar.spec import MAX_SOURCE_BYTES
from shared.grammar.vocabulary import Vocabulary

MAX_CPU_S = 0.1  # seconds to compile one grammar and to fill all masks
MAX_PARTS_CPU_S = 0.3  # seconds to find the part of a rejected grammar that is the cause
NUM_MASKS = 65  # masks of the grammar's start and of a walk along allowed tokens
MAX_WARNINGS = 16
SEED = 21


class PlanChecks:
    def __init__(self, vocabulary: Vocabulary, family: Family, token_id_of: TokenIdOf) -> None:
        self._vocabulary = vocabulary
        self._family = family
        self._token_id_of = token_id_of

    def check(self, request: GrammarRequest) -> CheckedPlan | None:
        """Returns the checked plan, or None if the output is unconstrained. Raises InvalidRequest
        and GrammarTooComplex.
        """
        plan = self._plan(request)
        if plan is None:
            return None
        _check_size(plan)
        try:
            has_warnings = bool(self._tried(plan.grammar)) or any(
                each.grammar.warnings for each in plan.parts
            )
        except InvalidRequest as error:
            self._blame_part(plan)
            raise _named(error, GrammarPart(plan.param, plan.grammar)) from error
        found = dict.fromkeys((*plan.warnings, *(self._warnings(plan) if has_warnings else ())))
        return CheckedPlan(msgspec.structs.replace(plan, parts=()), tuple(found)[:MAX_WARNINGS])

    def _plan(self, request: GrammarRequest) -> GrammarPlan | None:
        output = request.output
        if output is not None and output.kind == "gbnf":
            output = self._as_lark(output)
        family = PLAIN if request.continues_text else self._family
        try:
            tools = msgspec.json.decode(request.tools, type=ToolOptions) if request.tools else None
            return answer_grammar(output, tools, family, self._token_id_of)
        except RecursionError:
            raise GrammarTooComplex("a schema's references are nested too deeply") from None
        except (TypeError, AttributeError, KeyError, ValueError) as error:
            reason = "the parameters of a tool are no valid JSON Schema"
            raise InvalidRequest(f"tools: {reason}", param="tools") from error

    def _as_lark(self, output: OutputConstraint) -> OutputConstraint:
        part = GrammarPart(output.param, grammar_of(output))
        try:
            with _rejections():
                source = lark_of(output.source)
            self._tried(Grammar("lark", source))
        except InvalidRequest as error:
            raise _named(error, part) from error
        return msgspec.structs.replace(output, kind="lark", source=source)

    def _blame_part(self, plan: GrammarPlan) -> None:
        """Raises the error of the first part that has one, of those that do not compile first."""
        end_s = time.process_time() + MAX_PARTS_CPU_S
        others = [each for each in plan.parts if each.grammar != plan.grammar]
        for part, walks in [(each, walks) for walks in (False, True) for each in others]:
            if time.process_time() > end_s:
                return
            self._part_warnings(part, walks=walks)

    def _warnings(self, plan: GrammarPlan) -> Iterator[str]:
        for part in plan.parts:
            for each in self._part_warnings(part, walks=False):
                yield f"{part.param}: {located(each, part.grammar)}"

    def _part_warnings(self, part: GrammarPart, *, walks: bool) -> list[str]:
        try:
            return [*part.grammar.warnings, *self._tried(part.grammar, walks=walks)]
        except InvalidRequest as error:
            raise _named(error, part) from error

    def _tried(self, grammar: Grammar, *, walks: bool = True) -> list[str]:
        """Compiles the grammar and, with `walks`, fills masks. Returns llguidance's warnings about
        ignored keywords. Raises InvalidRequest and GrammarTooComplex.
        """
        began_s = time.process_time()
        with _rejections():
            matcher = self._vocabulary.compile(grammar.kind, grammar.source)
            if walks:
                _walk(matcher, began_s)
            return matcher.warnings


@contextmanager
def _rejections() -> Iterator[None]:
    """Converts all errors of a grammar to InvalidRequest or GrammarTooComplex."""
    try:
        yield
    except HearthError as error:
        if NO_OUTPUT in error.message:
            raise InvalidRequest(error.message) from error
        raise
    except MemoryError:
        raise GrammarTooComplex(CHECK_TIMEOUT) from None
    except BaseException as error:  # a panic of native code is no Exception
        raise InvalidRequest(f"invalid grammar: {type(error).__name__}") from error


def _check_size(plan: GrammarPlan) -> None:
    num_bytes = len(plan.grammar.source.encode())
    if num_bytes > MAX_SOURCE_BYTES:
        raise InvalidRequest(
            f"{plan.param}: the grammar has {num_bytes} bytes, the limit is {MAX_SOURCE_BYTES}",
            param=plan.param,
        )


def _named(error: InvalidRequest, part: GrammarPart) -> InvalidRequest:
    reason = located(error.message, part.grammar)
    return type(error)(f"{part.param}: {reason}", param=part.param)


def _walk(matcher: Matcher, began_s: float) -> None:
    """Fills masks along a random walk of allowed tokens. Raises GrammarTooComplex after
    MAX_CPU_S.
    """
    random, start = Random(SEED), matcher.copy()
    for _ in range(NUM_MASKS):
        words = matcher.fill()
        if time.process_time() - began_s > MAX_CPU_S:
            raise GrammarTooComplex(CHECK_TIMEOUT)
        token_id = _random_token(words, random)
        if token_id is None or not matcher.accept([token_id]) or matcher.is_complete:
            matcher = start.copy()


def _random_token(words: bytes, random: Random) -> int | None:
    """Returns one of the set bits, at or after a random byte."""
    start = random.randrange(len(words))
    for part, offset in ((words[start:], start), (words, 0)):
        rest = part.lstrip(b"\0")
        if rest:
            bits = [bit for bit in range(8) if rest[0] >> bit & 1]
            return (offset + len(part) - len(rest)) * 8 + random.choice(bits)
    return None
