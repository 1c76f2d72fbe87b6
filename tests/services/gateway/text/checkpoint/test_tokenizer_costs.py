"""Steps of a `tokenizer.json` that make long texts of short ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers

from services.gateway.text.checkpoint.tokenizer_costs import check_decoding, has_known_cost
from shared.errors import ConfigError

TEXT = "a" * 100
DECODERS: list[tuple[Sequence[Any], bool]] = [
    ([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Strip(" ", 1, 0)], True),
    ([decoders.Fuse(), decoders.Replace("a", "aaaa")], True),
    ([decoders.Fuse(), *[decoders.Replace("a", "a" * 16)] * 5], False),
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
        check_decoding(tokenizer.to_str())
        return
    with pytest.raises(ConfigError, match="times as long"):
        check_decoding(tokenizer.to_str())


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
    assert has_known_cost(tokenizer.to_str()) == is_known
