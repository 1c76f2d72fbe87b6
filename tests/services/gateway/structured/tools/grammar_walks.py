# ruff: noqa: RUF001 - markers of DeepSeek have full-width bars

"""Outputs that a grammar of calls allows, and texts that it matches."""

from __future__ import annotations

import json
import random
from functools import cache
from pathlib import Path

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken, Tokenizer

from services.gateway.structured.tools.call_grammars import call_grammar
from services.gateway.structured.tools.family import CallFormat, Family
from services.gateway.structured.tools.tool import ToolOptions

TOKENIZER = Path("shared/demo_model/tokenizer.json")
MARKERS = (
    "<tool_call>",
    "</tool_call>",
    "[TOOL_CALLS]",
    "[ARGS]",
    "<|tool_call|>",
    "<|/tool_call|>",
    "<start_function_call>",
    "<end_function_call>",
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
    "<escape>",
    "<|tool_call>",
    "<tool_call|>",
    '<|"|>',
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁sep｜>",
    "<|start|>",
    "<|channel|>",
    "<|constrain|>",
    "<|message|>",
)
# What ends strings and the calls of an answer.
ENDS: dict[CallFormat, tuple[str, ...]] = {
    "qwen_xml": ("\n</parameter>\n",),
    "glm": ("</arg_value>",),
    "pythonic": ("'", '"'),
    "function_gemma": ("<escape>",),
    "gemma4": ('<|"|>',),
    "kimi": ('"', "<|tool_calls_section_end|>"),
    "deepseek_v3": ('"', "<｜tool▁calls▁end｜>"),
    "deepseek_v31": ('"', "<｜tool▁calls▁end｜>"),
}
CLOSERS = ('"', "'", ",", "}", "]", ")", "\n", "</", "<", ">", "/")


class Walks:
    """Of a small vocabulary with the markers of all formats as tokens, or none of them."""

    def __init__(self, *, has_marker_tokens: bool) -> None:
        content = json.loads(TOKENIZER.read_text())
        content["added_tokens"] = [
            each for each in content["added_tokens"] if each["content"] not in MARKERS
        ]
        tokenizer = Tokenizer.from_str(json.dumps(content))
        markers = MARKERS if has_marker_tokens else ()
        tokenizer.add_special_tokens([AddedToken(each, special=True) for each in markers])
        self._ids = {each: tokenizer.token_to_id(each) for each in markers}
        self._texts = {token_id: text.encode() for text, token_id in self._ids.items()}
        self._eos = tokenizer.token_to_id("<|end|>")
        serialized = tokenizer.to_str()
        self._ll = LLTokenizer(serialized, eos_token=self._eos)
        closing = {self._ll.tokenize_str(each)[0] for each in CLOSERS}
        self._closing = closing | set(self._texts)

    def grammar(
        self, format: CallFormat, options: ToolOptions, *, after_trigger: bool = False
    ) -> str:
        family = Family(name=format, call_format=format, response_template={})
        rules = call_grammar(family, options, self._ids.get, after_trigger=after_trigger)
        assert rules is not None
        return f"start: {rules.start}\n{rules.rules}"

    def matches(self, grammar: str, text: str) -> bool:
        matcher = self._matcher(grammar)
        tokens = self._encode(text)
        accepted = matcher.try_consume_tokens(tokens)
        return accepted == len(tokens) and matcher.is_accepting()

    def walk(self, format: CallFormat, grammar: str, seed: int, *, num_free: int = 20) -> str:
        """An output of random tokens that the grammar allows, which after `num_free` of them ends
        as soon as it can.
        """
        matcher, rng, tokens = self._matcher(grammar), random.Random(seed), list[int]()
        while len(tokens) < 600:
            allowed = self._allowed(matcher)
            assert allowed, (self._decode(tokens), matcher.get_error())
            closing = [each for each in allowed if each in self._closing]
            if self._eos in allowed and (len(tokens) > num_free or len(allowed) == 1):
                return self._decode(tokens)
            if (
                len(tokens) > num_free
                and rng.random() < 0.5
                and (end := self._end(matcher, format))
            ):
                tokens += end
                continue
            is_free = len(tokens) < num_free and rng.random() < 0.6
            token = rng.choice(allowed if is_free or not closing else closing)
            if token == self._eos:
                return self._decode(tokens)
            assert matcher.consume_token(token), matcher.get_error()
            tokens.append(token)
        raise AssertionError(f"no end: {self._decode(tokens)}")

    def _end(self, matcher: LLMatcher, format: CallFormat) -> list[int]:
        """Accepts the first of the format's ends that can follow."""
        for end in map(self._encode, ENDS.get(format, ('"',))):
            if matcher.validate_tokens(end) == len(end):
                assert matcher.consume_tokens(end)
                return end
        return []

    def _matcher(self, grammar: str) -> LLMatcher:
        matcher = LLMatcher(self._ll, LLMatcher.grammar_from_lark(grammar), log_level=0)
        assert not matcher.is_error(), f"{matcher.get_error()}\n{grammar}"
        return matcher

    def _allowed(self, matcher: LLMatcher) -> list[int]:
        words = matcher.compute_bitmask()
        bits = np.unpackbits(np.frombuffer(words, np.uint8), bitorder="little")
        return list(map(int, np.flatnonzero(bits[: self._ll.vocab_size])))

    def _encode(self, text: str) -> list[int]:
        tokens: list[int] = []
        while text:
            starts = [(text.find(each), each) for each in self._ids if each in text]
            at, found = min(starts, default=(len(text), ""))
            tokens += self._ll.tokenize_str(text[:at])
            tokens += [self._ids[found]] if found else []
            text = text[at + len(found) :]
        return tokens

    def _decode(self, tokens: list[int]) -> str:
        pieces = (self._texts.get(each) or self._ll.decode_bytes([each]) for each in tokens)
        return b"".join(pieces).decode(errors="replace")


@cache
def walks(*, has_marker_tokens: bool = True) -> Walks:
    return Walks(has_marker_tokens=has_marker_tokens)
