"""Steps of a `tokenizer.json` that make long texts of short ones."""

from __future__ import annotations

import base64
import contextlib
import json
from collections.abc import Sequence
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers

from services.gateway.text.checkpoint.tokenizer_costs import (
    MAX_MERGES,
    MAX_VOCABULARY,
    check_size,
    check_steps,
    has_known_cost,
)
from services.gateway.text.tokenizer import MAX_SLOW_CHARS, PromptTokenizer
from shared.errors import ConfigError
from shared.tokenizer.tokenizer_steps import read_steps
from tests.support.grids import in_one_test

TEXT = "a" * 100
DECODERS: list[tuple[Sequence[Any], bool]] = [
    ([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Strip(" ", 1, 0)], True),
    ([decoders.Fuse(), decoders.Replace("a", "aaaa")], True),
    ([decoders.Fuse(), *[decoders.Replace("a", "a" * 4)] * 5], False),
    ([decoders.Replace("a", "bbb"), decoders.Replace("b", "aaa")], False),
    ([decoders.Replace("", "bc"), decoders.Replace("", "bc")], False),
    ([decoders.BPEDecoder(suffix="</w>")] * 3, True),
    ([decoders.BPEDecoder(suffix="")] * 3, False),
]


@pytest.mark.parametrize(("steps", "is_served"), DECODERS)
def test_decoder_makes_no_long_text_of_a_short_one(steps: Sequence[Any], is_served: bool) -> None:
    tokenizer = Tokenizer(models.BPE({TEXT: 0}, []))
    tokenizer.decoder = decoders.Sequence(list(steps))
    assert (len(tokenizer.decode([0, 0])) <= 8 * len(TEXT)) == is_served
    if is_served:
        check_steps(read_steps(tokenizer.to_str()))
        return
    with pytest.raises(ConfigError, match="times as long"):
        check_steps(read_steps(tokenizer.to_str()))


@pytest.mark.parametrize(
    ("steps", "is_known"),
    [
        ([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")], True),
        ([normalizers.Prepend("▁" * 200_000)], False),
        ([normalizers.Replace("a", "bbb"), normalizers.Replace("b", "aaa")], False),
        ([normalizers.Replace("", "bc"), normalizers.Replace("", "bc")], False),
    ],
)
def test_normalizer_that_writes_much_has_no_known_cost(
    steps: Sequence[Any], is_known: bool
) -> None:
    tokenizer = Tokenizer(models.BPE({"a": 0}, []))
    tokenizer.normalizer = normalizers.Sequence(list(steps))
    assert has_known_cost(read_steps(tokenizer.to_str())) == is_known


@pytest.mark.parametrize("kind", ["NFC", "NFD", "NFKC", "NFKD", "Lowercase", "Strip"])
def test_text_that_is_encoded_at_once_is_short_when_normalized(kind: str) -> None:
    """The characters that grow most, and each one of some scripts."""
    tokenizer = Tokenizer(models.BPE({"a": 0}, []))
    step = tokenizer.normalizer = getattr(normalizers, kind)()
    found = PromptTokenizer(tokenizer.to_str())
    some = (*"a\ufdfa\U0001d160\u1f82\u0130", *map(chr, range(0x100, 0x2000)))
    growth = max(len(step.normalize_str(each)) for each in some)
    assert 0 < found.max_known_chars * growth <= MAX_SLOW_CHARS
    assert found.max_known_chars >= MAX_SLOW_CHARS // growth - 1


def replace(pattern: dict[str, str], content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def prepend(text: str) -> dict[str, Any]:
    return {"type": "Prepend", "prepend": text}


def precompiled(text: str) -> dict[str, Any]:
    trie = bytes(8)
    data = len(trie).to_bytes(4, "little") + trie + b"\0".join([b"b", text.encode(), b"c"])
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(data).decode()}


ANY, LETTER, SPACE = {"Regex": r"\s*"}, {"String": "a"}, {"String": " "}


@in_one_test(
    ("steps", "reason"),
    [
        ([replace(LETTER, "b" * 999)], "999 times"),
        ([replace(ANY, "b" * 300)], "601 times"),
        ([replace(ANY, "bb")] * 5, "485 times"),
        ([prepend("b" * 300)], "301 times"),
        ([precompiled("é" * 300)], "300 times"),
        ([precompiled("é" * 18), {"type": "Strip"}, replace(ANY, "▁")], ""),  # as T5
        ([prepend("▁"), replace(SPACE, "▁")], ""),  # as Llama 2
        ([{"type": "NFC"}, replace(ANY, " "), {"type": "Lowercase"}], ""),  # as CLIP
        ([replace(ANY, "")] * 40, ""),
        ([replace(ANY, "b")] * 7, ""),
        ([replace(ANY, "b")] * 8, "511 times"),
        ([replace({"Regex": r"[^\s\]]"}, "b")] * 40, ""),
        ([replace({"Regex": r"\p{Z} {2,}"}, "b")] * 40, ""),
        ([replace({"Regex": r"\b"}, "b")] * 8, "511 times"),
        ([replace({"Regex": r"[[a]]?"}, "b")] * 8, "511 times"),
        (
            [
                *({"type": "Lowercase"}, replace({"Regex": r"[!-/:-@\[-`]"}, "")),
                *(replace({"Regex": r"\s+"}, " "), replace(ANY, " "), precompiled("é" * 18)),
                *(replace({"Regex": " {2,}"}, "▁"), prepend("▁")),
            ],
            "",
        ),  # as SigLIP
    ],
)
def test_no_normalizer_makes_much_of_one_character(steps: list[Any], reason: str) -> None:
    nested = {"type": "Sequence", "normalizers": [{"type": "Sequence", "normalizers": steps}]}
    check(json.dumps({"normalizer": nested}), reason)


@pytest.mark.parametrize(("num_texts", "reason"), [(1, ""), (3, "writes a text 3 times")])
def test_no_post_processor_repeats_a_text(num_texts: int, reason: str) -> None:
    template = {"type": "TemplateProcessing", "single": [{"Sequence": {"id": "A"}}] * num_texts}
    check(json.dumps({"post_processor": template}), reason)


@pytest.mark.parametrize("affix", ["continuing_subword_prefix", "end_of_word_suffix"])
def test_no_model_writes_much_at_each_character(affix: str) -> None:
    for text, reason in (("##", ""), ("#" * 300, "writes 300 characters")):
        check(json.dumps({"model": {"type": "BPE", affix: text}}), reason)


def check(source: str, reason: str) -> None:
    """`reason`: empty: none."""
    refused = pytest.raises(ConfigError, match=reason) if reason else contextlib.nullcontext()
    with refused:
        check_steps(read_steps(source))


@pytest.mark.parametrize(("field", "most"), [("vocab", MAX_VOCABULARY), ("merges", MAX_MERGES)])
def test_vocabulary_is_bounded(field: str, most: int) -> None:
    def source(num: int) -> str:
        return f'{{"model":{{"{field}":[{",".join("0" * num)}]}}}}'

    check_size(source(most))
    with pytest.raises(ConfigError, match=f"it has {most + 1} .*limit is {most}"):
        check_size(source(most + 1))
