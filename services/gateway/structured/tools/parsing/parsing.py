"""The parsing of one model's responses by its family's template, compiled for its tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

from services.gateway.structured.tools.family import Family
from services.gateway.structured.tools.parsing.marker_tokens import MarkerTokens, marker_tokens
from services.gateway.structured.tools.parsing.response_parser import ResponseParser
from services.gateway.structured.tools.parsing.response_template import compiled_template
from services.gateway.structured.tools.tool import ToolOptions
from services.gateway.text.history.call_ids import CallIds, mistral_id

NO_TOOLS: Mapping[str, Mapping[str, Any]] = {}


class ResponseParsing:
    """Creates parsers for a model's responses. Raises ConfigError for an invalid response
    template.
    """

    def __init__(self, family: Family, added_tokens: Mapping[str, int]) -> None:
        """`added_tokens` are the ids of the tokenizer's added tokens, by text."""
        source = family.response_template
        self.family = family
        self.markers = MarkerTokens() if not source else marker_tokens(source, added_tokens)
        self._full = compiled_template(source, self.markers) if source else None
        self._without_calls = (
            compiled_template(source, self.markers, calls=False) if source else None
        )

    def applies(self, tools: ToolOptions | None) -> bool:
        """Whether a response with these tools can contain calls or reasoning."""
        if self._full is None:
            return False
        has_calls = self.family.call_format is not None or self._full.first("calls") is not None
        return self._full.first("thinking") is not None or (
            has_calls and tools is not None and bool(tools.callable_tools)
        )

    def parser(
        self,
        tools: ToolOptions | None,
        choice_index: int,
        *,
        request_id: str,
        prompt_tail: str,
        num_earlier_calls: int = 0,
        is_constrained: bool = False,
        opens_reasoning: bool = True,
    ) -> ResponseParser:
        """Returns the parser of one choice. `prompt_tail` is the last text of the prompt.
        `num_earlier_calls` counts the conversation's calls. `is_constrained` and `opens_reasoning`
        are passed to `ResponseParser`.
        """
        offered = () if tools is None else tools.callable_tools
        template = self._full if offered else self._without_calls
        assert template is not None, "`applies` is true"
        form = self.family.call_ids

        def call_id_of(index: int, name: str) -> str:
            own = _own_id(request_id, choice_index, index)
            return _in_form(own, form, name, num_earlier_calls + index)

        return ResponseParser(
            template,
            self.markers,
            choice_index,
            schemas={each.name: each.parameters for each in offered} or NO_TOOLS,
            call_id_of=call_id_of,
            custom={each.name for each in offered if each.custom is not None},
            is_thinking=self._opens_thinking(prompt_tail),
            is_constrained=is_constrained,
            opens_reasoning=opens_reasoning,
        )

    def _opens_thinking(self, prompt_tail: str) -> bool:
        opening = self.family.think_open.rstrip()
        return bool(opening) and prompt_tail.rstrip().endswith(opening)


def _own_id(request_id: str, choice_index: int, index: int) -> str:
    """Returns an id that is equal for the same call, so that a resumed response does not change."""
    source = f"{request_id}\0{choice_index}\0{index}".encode()
    return f"call_{blake2b(source, digest_size=12).hexdigest()}"


def _in_form(own: str, form: CallIds, name: str, index: int) -> str:
    match form:
        case "kimi":
            return f"functions.{name}:{index}"
        case "mistral":
            return mistral_id(own)
    return own
