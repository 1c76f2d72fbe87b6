"""tiktoken returns the ids of tokenizers, and is used only where this is certain."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from services.cli.cluster.service_options import DEMO_MODEL_DIR
from services.gateway.text.chat_template import LiteralText
from services.gateway.text.tiktoken_bpe import GPT_2, LLAMA_3, MAX_CHARS, QWEN_2
from services.gateway.text.tokenizer import PromptTokenizer
from tests.support.grids import in_short_run

File = dict[str, Any]
Change = Callable[[File], object]


def demo_file() -> File:
    parsed: File = json.loads((DEMO_MODEL_DIR / "tokenizer.json").read_text())
    return parsed


def split_by(pattern: str) -> Change:
    """Splits words by `pattern`, in the form of Llama 3's file."""
    split = {"type": "Split", "behavior": "Isolated", "invert": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
    both = [split | {"pattern": {"Regex": pattern}}, byte_level | {"trim_offsets": True}]
    return lambda file: file.update(pre_tokenizer={"type": "Sequence", "pretokenizers": both})


def with_all_pairs(file: File) -> None:
    """Merges as in Llama 3: all pairs that form a token, in id order; a known word is one token."""
    vocab = file["model"]["vocab"]
    by_id = sorted(vocab, key=vocab.__getitem__)
    splits = ((text[:cut], text[cut:]) for text in by_id for cut in range(1, len(text)))
    merges = [list(pair) for pair in splits if pair[0] in vocab and pair[1] in vocab]
    file["model"].update(merges=merges, ignore_merges=True)


def with_unmergeable_word(file: File) -> None:
    """Adds a token that no pair forms: only a complete word becomes this token."""
    with_all_pairs(file)
    file["model"]["vocab"]["zqxjk"] = 60000


def with_unlisted_merge(file: File) -> None:
    """Adds a token for a complete word whose two parts, both tokens, are not a listed pair."""
    file["model"]["vocab"]["inhe"] = 60000
    file["model"].update(ignore_merges=True)


def with_added_word(file: File) -> None:
    """Adds a token that is not special, and that is the longest match but not the first."""
    flags = dict.fromkeys(("special", "normalized", "lstrip", "rstrip", "single_word"), False)
    file["added_tokens"].append(flags | {"id": 60001, "content": "<|user|>!"})


def with_nfc(file: File) -> None:
    file.update(normalizer={"type": "NFC"})


def unchanged(file: File) -> None:
    pass


ACCEPTED: dict[str, list[Change]] = {
    "gpt-2": [unchanged],
    "gpt-2, an unreachable token": [lambda file: file["model"]["vocab"].update(zqxjk=60000)],
    "llama-3": [split_by(LLAMA_3), with_all_pairs],
    "llama-3, an unmergeable word": [split_by(LLAMA_3), with_unmergeable_word],
    "qwen-2": [split_by(QWEN_2), with_nfc, with_added_word],
}


class TokenizerPair:
    """PromptTokenizer and the two views of tokenizers, for one file."""

    def __init__(self, path: Path) -> None:
        self.prompt_tokenizer = PromptTokenizer(path.read_text())
        self.marked = Tokenizer.from_file(str(path))
        self.literal = Tokenizer.from_file(str(path))
        self.literal.encode_special_tokens = True

    @property
    def is_faster(self) -> bool:
        encode: Any = self.prompt_tokenizer._encode
        return bool(encode.__qualname__.startswith("_bounded"))

    def check(self, text: str) -> None:
        expected = self.marked.encode(text, add_special_tokens=False).ids
        assert self.prompt_tokenizer.encode([text]) == expected

    def check_literal(self, text: str) -> None:
        expected = self.literal.encode(text, add_special_tokens=False).ids
        assert self.prompt_tokenizer.encode([LiteralText(text)]) == expected


def make(folder: Path, *changes: Change) -> TokenizerPair:
    file = demo_file()
    for change in changes:
        change(file)
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(file))
    return TokenizerPair(path)


def texts() -> st.SearchStrategy[str]:
    """Texts that patterns and merges distinguish; special tokens, complete and cut."""
    words = ["'s", "'LL", "'\u017f", "1", "23", "4567", "a", "the", " zqxjk", "\nzqxjk", "zqxjk"]
    space = [" ", "  ", "\n", "\r\n", "\t", "\u00a0"]
    marks = [
        "<|user|>",
        "<|user|>!",
        "<|us",
        "er|>",
        "!",
        "...",
        "é",
        "e\u0301",
        "東",
        "😀",
        "\u0300",
    ]
    return st.lists(st.sampled_from(words + space + marks) | st.text(max_size=5)).map("".join)


@pytest.fixture(scope="module", params=ACCEPTED)
def tokenizer_pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> TokenizerPair:
    return make(tmp_path_factory.mktemp("model"), *ACCEPTED[request.param])


@settings(max_examples=80, deadline=None)
@given(text=texts())
def test_tiktoken_ids_equal_tokenizers_ids(tokenizer_pair: TokenizerPair, text: str) -> None:
    assert tokenizer_pair.is_faster
    tokenizer_pair.check(text)
    tokenizer_pair.check_literal(text)


def test_ids_of_all_tokens_in_several_orders_are_equal(tokenizer_pair: TokenizerPair) -> None:
    ids = range(tokenizer_pair.marked.get_vocab_size())
    tokens = [tokenizer_pair.marked.decode([each], skip_special_tokens=False) for each in ids]
    tokenizer_pair.check("".join(tokens))
    for step in (7, 131, 997):
        tokenizer_pair.check("".join(tokens[each * step % len(tokens)] for each in ids))


@pytest.mark.parametrize(
    "tokenizer_pair", in_short_run({"qwen-2"}, ACCEPTED), indirect=True, scope="module"
)
def test_ids_of_every_character_are_equal(tokenizer_pair: TokenizerPair) -> None:
    """Each library has its own tables of letters, digits and spaces."""
    for text in characters():
        tokenizer_pair.check(text)


def characters() -> Iterator[str]:
    """Characters of planes 0 and 1 (others: ideographs), in the contexts that patterns check."""
    for start in range(0, 0x20000, 1024):
        block = (chr(code) for code in range(start, start + 1024) if not 0xD800 <= code < 0xE000)
        yield "".join(f"a{char}1{char} " for char in block)


@pytest.mark.each_value
@pytest.mark.parametrize("filling", [" ", "\n", " \n", "a", "ab1"])
def test_ids_of_text_with_max_chars_are_equal(tokenizer_pair: TokenizerPair, filling: str) -> None:
    """White space before a word makes the pattern matching backtrack."""
    tokenizer_pair.check((filling * MAX_CHARS)[: MAX_CHARS - 1] + "x")


def test_text_beyond_max_chars_uses_tokenizers(tmp_path: Path) -> None:
    space = " " * (MAX_CHARS + 1)
    tokenizer_pair = make(tmp_path)
    assert tokenizer_pair.marked.decode(tokenizer_pair.prompt_tokenizer.encode([space])) == space


REJECTED: dict[str, Change] = {
    "an unknown pattern": split_by(GPT_2 + "|x"),
    "merges in another order": lambda file: file["model"]["merges"].reverse(),
    "a byte without a token": lambda file: file["model"]["vocab"].pop("À"),
    "a prefix space": lambda file: file["pre_tokenizer"].update(add_prefix_space=True),
    "a word that tiktoken would merge": with_unlisted_merge,
    "dropout": lambda file: file["model"].update(dropout=0.5),
    "an unknown normalizer": lambda file: file.update(normalizer={"type": "Lowercase"}),
    "an end-of-word suffix": lambda file: file["model"].update(end_of_word_suffix="</w>"),
    "a token that strips space": lambda file: file["added_tokens"][0].update(lstrip=True),
    "a version among merges": lambda file: file["model"].update(
        merges=["#version: 0.2", *(" ".join(each) for each in file["model"]["merges"])]
    ),
    "a single-word token": lambda file: file["added_tokens"][0].update(single_word=True),
}


@pytest.mark.parametrize("name", REJECTED)
def test_tokenizers_is_used_if_ids_could_differ(tmp_path: Path, name: str) -> None:
    assert not make(tmp_path, REJECTED[name]).is_faster
