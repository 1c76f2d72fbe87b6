# ruff: noqa: RUF001
"""A `tiktoken.model` becomes a `tokenizer.json` with tiktoken's own ids, once and for all."""

from __future__ import annotations

import base64
import json
import random
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import tiktoken
from tokenizers import Tokenizer

from shared.errors import CheckpointError
from shared.tokenizer.tiktoken_model import KIMI, read_ranks
from shared.tokenizer.tokenizer_file import tokenizer_file

LINES = (  # in 20 scripts
    "The quick brown fox jumps over the dog, doesn't it? I'LL say WE'VE seen McDonald's HTTPServer",
    "Η γρήγορη καφέ αλεπού πηδάει πάνω από το σκυλί",
    "Съешь же ещё этих мягких французских булок, да выпей чаю",
    "人人生而自由，在尊严和权利上一律平等。他们赋有理性",
    "吾輩は猫である。名前はまだ無い。カタカナとひらがな",
    "모든 인간은 태어날 때부터 자유로우며",
    "يولد جميع الناس أحراراً متساوين في الكرامة",
    "כל בני האדם נולדו בני חורין ושווים",
    "सभी मनुष्यों को गौरव और अधिकारों के मामले में",
    "সমস্ত মানুষ স্বাধীনভাবে সমান মর্যাদা",
    "எல்லா மனிதர்களும் சுதந்திரமாகவே பிறக்கின்றனர்",
    "ప్రతిపత్తిస్వత్వముల విషయమున మానవులెల్లరును",
    "ಎಲ್ಲಾ ಮಾನವರೂ ಸ್ವತಂತ್ರರಾಗಿಯೇ ಹುಟ್ಟಿದ್ದಾರೆ",
    "മനുഷ്യരെല്ലാവരും തുല്യാവകാശങ്ങളോടും",
    "มนุษย์ทั้งหลายเกิดมามีอิสระและเสมอภาคกัน",
    "ມະນຸດທຸກຄົນເກີດມາມີກຽດສັກສີ",
    "ყველა ადამიანი იბადება თავისუფალი",
    "Բոլոր մարդիկ ծնվում են ազատ ու հավասար",
    "ሁሉም ሰው ነጻና እኩል ክብርና መብት",
    "មនុស្សទាំងអស់កើតមកមានសេរីភាព",
    "for i in range(10_000):\n\tprint(f'{i:>5}')  # 12345.678e-9\r\n\r\n   x",
    "😀👩‍👩‍👧 e\u0301 Å ﬁ 〇々〆 ｶﾞ ǅ ʰ 𝒳  \u3000 \u00a0 end",
)
NAMED = {
    "[BOS]": {"special": True},
    "<|im_end|>": {"special": True},
    "<|tool_calls_section_begin|>": {"special": True},
    "<think>": {"special": False},
}


def trained_ranks(num_merges: int) -> dict[bytes, int]:
    """All bytes, and the pairs that are most frequent in the lines; then a word that no merges form
    but whole.
    """
    words = [[bytes([byte]) for byte in word.encode()] for line in LINES for word in line.split()]
    ranks = {
        bytes([byte]): rank for rank, byte in enumerate(random.Random(3).sample(range(256), 256))
    }
    for _ in range(num_merges):
        pairs = Counter(pair for word in words for pair in pairwise(word))
        (left, right), _ = min(pairs.items(), key=lambda each: (-each[1], each[0]))
        ranks.setdefault(left + right, len(ranks))
        for word in words:
            at = 0
            while at < len(word) - 1:
                if (word[at], word[at + 1]) == (left, right):
                    word[at : at + 2] = [left + right]
                at += 1
    ranks[b" zqxjk"] = len(ranks)
    return ranks


@pytest.fixture(scope="module")
def ranks() -> dict[bytes, int]:
    return trained_ranks(500)


@pytest.fixture
def folder(tmp_path: Path, ranks: dict[bytes, int]) -> Path:
    model = b"".join(base64.b64encode(token) + b" %d\n" % rank for token, rank in ranks.items())
    (tmp_path / "tiktoken.model").write_bytes(model)
    write_config(tmp_path, len(ranks))
    return tmp_path


def write_config(folder: Path, first_id: int, **fields: Any) -> None:
    flags = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False}
    added = {
        str(first_id + 2 * index): {"content": text, **flags, **own}
        for index, (text, own) in enumerate(NAMED.items())
    }
    config = {
        "added_tokens_decoder": added,
        "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
        "tokenizer_class": "TikTokenTokenizer",
        **fields,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def environ(folder: Path) -> dict[str, str]:
    return {"HEARTH_CACHE_DIR": str(folder / "cache")}


def test_ids_are_those_of_tiktoken(folder: Path, ranks: dict[bytes, int]) -> None:
    tokenizer = Tokenizer.from_file(str(tokenizer_file(folder, environ(folder))))
    own = tiktoken.Encoding("kimi", pat_str=KIMI, mergeable_ranks=ranks, special_tokens={})
    draw = random.Random(5)
    mixed = [
        "".join(
            line[(at := draw.randrange(len(line))) : at + draw.randrange(1, 12)]
            for line in draw.choices(LINES, k=6)
        )
        for _ in range(1500)
    ]
    for line in (*LINES, " zqxjk zqxjk", *mixed):
        assert tokenizer.encode(line).ids == own.encode_ordinary(line), line
        assert tokenizer.decode(tokenizer.encode(line).ids) == line


def test_added_tokens_have_the_names_of_the_config(folder: Path, ranks: dict[bytes, int]) -> None:
    tokenizer = Tokenizer.from_file(str(tokenizer_file(folder, environ(folder))))
    added, first = tokenizer.get_added_tokens_decoder(), len(ranks)
    assert len(added) == 256
    assert added[first].content == "[BOS]"
    assert added[first + 1].content == f"<|reserved_token_{first + 1}|>"
    assert added[first + 2].content == "<|im_end|>"
    assert [each.content for each in added.values() if not each.special] == ["<think>"]
    assert tokenizer.encode("a<|im_end|>").ids[-1] == first + 2


def test_a_file_is_converted_once(folder: Path) -> None:
    path = tokenizer_file(folder, environ(folder))
    written = path.stat().st_mtime_ns
    assert tokenizer_file(folder, environ(folder)) == path
    assert path.stat().st_mtime_ns == written
    content = path.read_bytes()
    path.write_bytes(content[:-9])  # as if the disk had lost its end
    assert tokenizer_file(folder, environ(folder)).read_bytes() == content
    write_config(folder, 757, added_tokens_decoder={})
    assert tokenizer_file(folder, environ(folder)) != path


def test_a_tokenizer_of_the_folder_comes_first(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")
    assert tokenizer_file(folder, environ(folder)) == folder / "tokenizer.json"


@pytest.mark.parametrize(
    ("config", "has_ranks", "error"),
    [
        ({}, False, "TikTokenTokenizer is code of the checkpoint, which is never run"),
        (
            {"auto_map": {"AutoTokenizer": "org/name--tokenization_x.Fast"}},
            True,
            r"how tokenization_x.Fast splits words is not known, only that of tokenization_kimi",
        ),
        ({"auto_map": {}}, True, "how this tokenizer splits words is not known"),
        (
            {"added_tokens_decoder": {"5": {"content": "<s>"}}},
            True,
            "added token '<s>' has id 5, not 757 to 1012",
        ),
        ({"added_tokens_decoder": {"x": {"content": "<s>"}}}, True, "tokenizer_config.json: inv"),
    ],
)
def test_a_bad_folder_is_one_line(
    folder: Path, config: dict[str, Any], has_ranks: bool, error: str
) -> None:
    write_config(folder, 757, **config)
    if not has_ranks:
        (folder / "tiktoken.model").unlink()
    with pytest.raises(CheckpointError, match=error) as raised:
        tokenizer_file(folder, environ(folder))
    assert "\n" not in raised.value.message


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"IQ== 0\nIg==", "line 2 is no token and rank"),
        (b"I?== 0", "line 1 is no token and rank"),
        (b"IQ== 0\nIg== 2", "ranks of 2 tokens do not count from 0"),
        (b"IQ== 0\nIg== 1", "byte 0 is no token"),
    ],
)
def test_bad_ranks_are_one_line(data: bytes, error: str) -> None:
    with pytest.raises(CheckpointError, match=error):
        read_ranks(data)


@pytest.mark.parametrize("name", ["tokenizer.model", "tekken.json", "merges.txt"])
def test_folder_with_another_form_of_tokenizer_says_how_to_convert_it(
    tmp_path: Path, name: str
) -> None:
    (tmp_path / name).write_bytes(b"\n\x05")
    with pytest.raises(CheckpointError, match=f"has {name} and no tokenizer.json.*AutoTokenizer"):
        tokenizer_file(tmp_path, environ(tmp_path))
