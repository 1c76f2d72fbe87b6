"""tiktoken gives what tokenizers gives, and is asked only where it does."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from services.cli.service_options import DEMO_MODEL_DIR
from services.gateway.text.chat_template import LiteralText
from services.gateway.text.tiktoken_bpe import GPT_2, LLAMA_3, MAX_CHARS, QWEN_2
from services.gateway.text.tokenizer import PromptTokenizer

File = dict[str, Any]
Change = Callable[[File], object]


def demo_file() -> File:
    found: File = json.loads((DEMO_MODEL_DIR / "tokenizer.json").read_text())
    return found


def cut_by(pattern: str) -> Change:
    """Words as in Llama 3's file."""
    split = {"type": "Split", "behavior": "Isolated", "invert": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
    both = [split | {"pattern": {"Regex": pattern}}, byte_level | {"trim_offsets": True}]
    return lambda file: file.update(pre_tokenizer={"type": "Sequence", "pretokenizers": both})


def all_pairs(file: File) -> None:
    """Llama 3's list: every pair that makes a token, in the order of ids; words are looked up."""
    vocab = file["model"]["vocab"]
    by_id = sorted(vocab, key=vocab.__getitem__)
    splits = ((text[:cut], text[cut:]) for text in by_id for cut in range(1, len(text)))
    merges = [list(pair) for pair in splits if pair[0] in vocab and pair[1] in vocab]
    file["model"].update(merges=merges, ignore_merges=True)


def out_of_reach(file: File) -> None:
    """A token that only a whole word is: no pair makes it."""
    all_pairs(file)
    file["model"]["vocab"]["zqxjk"] = 60000


def two_words_in_one(file: File) -> None:
    """A token that only a whole word is, of two neighbours that are no pair of the list."""
    file["model"]["vocab"]["inhe"] = 60000
    file["model"].update(ignore_merges=True)


def added_word(file: File) -> None:
    """Neither special nor the first to be found, but the longest."""
    flags = dict.fromkeys(("special", "normalized", "lstrip", "rstrip", "single_word"), False)
    file["added_tokens"].append(flags | {"id": 60001, "content": "<|user|>!"})


def nfc(file: File) -> None:
    file.update(normalizer={"type": "NFC"})


def nothing(file: File) -> None:
    pass


ACCEPTED: dict[str, list[Change]] = {
    "gpt-2": [nothing],
    "gpt-2, a token that no text makes": [lambda file: file["model"]["vocab"].update(zqxjk=60000)],
    "llama-3": [cut_by(LLAMA_3), all_pairs],
    "llama-3, a word apart": [cut_by(LLAMA_3), out_of_reach],
    "qwen-2": [cut_by(QWEN_2), nfc, added_word],
}


class Made:
    """Both ways to tokenize by one file."""

    def __init__(self, path: Path) -> None:
        self.prompt_tokenizer = PromptTokenizer(path)
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


def make(folder: Path, *changes: Change) -> Made:
    file = demo_file()
    for change in changes:
        change(file)
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(file))
    return Made(path)


def texts() -> st.SearchStrategy[str]:
    """Of what patterns and merges tell apart; special tokens, whole and torn."""
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
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    return make(tmp_path_factory.mktemp("model"), *ACCEPTED[request.param])


@settings(max_examples=300, deadline=None)
@given(text=texts())
def test_both_give_the_same(made: Made, text: str) -> None:
    assert made.is_faster
    made.check(text)
    made.check_literal(text)


def test_every_token_and_every_two_in_a_row(made: Made) -> None:
    ids = range(made.marked.get_vocab_size())
    tokens = [made.marked.decode([each], skip_special_tokens=False) for each in ids]
    made.check("".join(tokens))
    for step in (7, 131, 997):
        made.check("".join(tokens[each * step % len(tokens)] for each in ids))


def test_every_character_is_of_the_same_kind(made: Made) -> None:
    """Letter, digit, space or none of them: the libraries have tables of their own."""
    for text in characters():
        made.check(text)


def characters() -> Iterator[str]:
    """Those of the planes that have more than ideographs, in the places that patterns look at."""
    for start in range(0, 0x20000, 1024):
        block = (chr(code) for code in range(start, start + 1024) if not 0xD800 <= code < 0xE000)
        yield "".join(f"a{char}1{char} " for char in block)


@pytest.mark.parametrize("filling", [" ", "\n", " \n", "a", "ab1"])
def test_as_long_as_it_may_be(made: Made, filling: str) -> None:
    """White space before a word is what the pattern matching has to find its way back from."""
    made.check((filling * MAX_CHARS)[: MAX_CHARS - 1] + "x")


def test_what_would_overflow_its_stack_is_left_to_tokenizers(tmp_path: Path) -> None:
    space = " " * 1_000_000
    made = make(tmp_path)
    assert made.marked.decode(made.prompt_tokenizer.encode([space])) == space


REFUSED: dict[str, Change] = {
    "another pattern": cut_by(GPT_2 + "|x"),
    "another order": lambda file: file["model"]["merges"].reverse(),
    "a byte without a token": lambda file: file["model"]["vocab"].pop("À"),
    "a space before": lambda file: file["pre_tokenizer"].update(add_prefix_space=True),
    "a word that would be merged": two_words_in_one,
    "dropout": lambda file: file["model"].update(dropout=0.5),
    "another normalizer": lambda file: file.update(normalizer={"type": "Lowercase"}),
    "a mark at the end of words": lambda file: file["model"].update(end_of_word_suffix="</w>"),
    "a token that takes space": lambda file: file["added_tokens"][0].update(lstrip=True),
    "a version among merges": lambda file: file["model"].update(
        merges=["#version: 0.2", *(" ".join(each) for each in file["model"]["merges"])]
    ),
    "a token within words": lambda file: file["added_tokens"][0].update(single_word=True),
}


@pytest.mark.parametrize("name", REFUSED)
def test_tokenizers_is_asked_where_they_differ(tmp_path: Path, name: str) -> None:
    assert not make(tmp_path, REFUSED[name]).is_faster
