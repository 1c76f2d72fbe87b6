"""Word wrap in a terminal, whose cursor the test follows."""

from __future__ import annotations

import random
import re

import pytest

from services.client.word_wrap import WordWrap

TEXT = (
    "Hearth computes 1,234.5 tokens/s on decode.a1b2c3d4e5f6 of a-rather-long-name-of-a-model: "
    "a block of code\n    for each in range(10):\n\tprint(each)\nand the end.\n\n"
)
WIDE = "缓存" * 30


def shown(width: int, parts: list[str]) -> list[str]:
    """The lines on the screen, of which none may be full."""
    wrap, lines = WordWrap(width), [""]
    for step in re.findall(r"\x1b\[\d+D\x1b\[K|[^\x1b]", "".join(map(wrap.wrap, parts))):
        if step == "\n":
            lines.append("")
        elif step.startswith("\x1b"):
            lines[-1] = lines[-1][: -int(step[2:].partition("D")[0])]
        else:
            lines[-1] += step
    return lines


@pytest.mark.parametrize("width", [20, 40, 80])
def test_words_are_whole_however_the_text_comes(width: int) -> None:
    rng, text, parts = random.Random(width), TEXT * 3, []
    while text:
        size = rng.randint(1, 12)
        parts.append(text[:size])
        text = text[size:]
    lines = shown(width, parts)
    assert max(len(each.expandtabs(8)) for each in lines) < width
    words, whole = " ".join(lines).split(), (TEXT * 3).split()
    assert "".join(words) == "".join(whole)
    assert {each for each in whole if len(each) < width} <= {*words}


def test_a_word_longer_than_a_line_and_wide_characters_fill_lines() -> None:
    assert shown(11, ["to ", "x" * 25]) == ["to ", "x" * 10, "x" * 10, "x" * 5]
    assert shown(21, [WIDE[:31], WIDE[31:]]) == [WIDE[:10]] * 6
    assert shown(11, ["a\nb\n"]) == ["a", "b", ""]
