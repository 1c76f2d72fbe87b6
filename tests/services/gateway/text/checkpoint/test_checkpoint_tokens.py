"""Special, added and end tokens of a folder's files, beside what transformers makes of them."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from services.gateway.text.model_files import ModelFiles
from shared.errors import CheckpointError
from shared.grammar.vocabulary import load_vocabulary
from shared.tokenizer.end_tokens import end_token_ids
from shared.tokenizer.special_tokens import read_special_tokens

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from transformers import PreTrainedTokenizerFast

TEXT = "a<|extra|>b<|im_end|> <s>hello</s><tool_call>"
EXTRA = {"content": "<|extra|>", "special": True, "normalized": False}
# By file: fields that are changed; ... for one that is removed.
FOLDERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "decoder": {"tokenizer_config.json": {"added_tokens_decoder": {"400": EXTRA}}},
    "decoder_of_another_id": {"tokenizer_config.json": {"added_tokens_decoder": {"7000": EXTRA}}},
    "decoder_of_several": {
        "tokenizer_config.json": {
            "added_tokens_decoder": {
                "401": {"content": "<tool_call>", "special": False},
                "400": {**EXTRA, "lstrip": True},
                "1": {"content": "<|im_start|>", "special": False, "normalized": True},
            }
        }
    },
    "added_tokens": {"added_tokens.json": {"<|extra|>": 401, "<tool_call>": 400}},
    "added_and_special": {
        "added_tokens.json": {"<|extra|>": 400},
        "special_tokens_map.json": {"unk_token": "<|extra|>"},
    },
    "map": {
        "tokenizer_config.json": {"eos_token": None},
        "special_tokens_map.json": {"bos_token": "<|im_start|>", "eos_token": {"content": "</s>"}},
    },
    "map_beside_a_decoder": {
        "tokenizer_config.json": {"added_tokens_decoder": {"400": EXTRA}},
        "special_tokens_map.json": {"bos_token": "<|im_start|>"},
    },
    "all_named": {
        "tokenizer_config.json": {
            "sep_token": "<s>",
            "cls_token": {"__type": "AddedToken", "content": "</s>", "lstrip": True},
            "mask_token": "<mask>",
            "image_token": "<image>",
            "extra_special_tokens": {"audio_token": "<audio>"},
        }
    },
    "listed": {"tokenizer_config.json": {"additional_special_tokens": ["<|extra|>", "<s>"]}},
    "listed_anew": {"tokenizer_config.json": {"extra_special_tokens": ["<|extra|>"]}},
    "of_the_vocabulary": {"tokenizer_config.json": {"bos_token": "hello"}},
}

Folder = Callable[[dict[str, Any]], Path]


@pytest.fixture
def folder(model_dir: Path, tmp_path: Path) -> Folder:
    def write(files: dict[str, Any]) -> Path:
        for each in model_dir.iterdir():
            (tmp_path / each.name).write_bytes(each.read_bytes())
        for name, changed in files.items():
            path = tmp_path / name
            fields = json.loads(path.read_text()) if path.exists() else {}
            merged = {key: value for key, value in {**fields, **changed}.items() if value != ...}
            path.write_text(json.dumps(merged))
        return tmp_path

    return write


@pytest.mark.parametrize("name", FOLDERS)
def test_tokens_are_those_of_transformers(folder: Folder, name: str) -> None:
    path = folder(FOLDERS[name])
    reference = PreTrainedTokenizerFast.from_pretrained(str(path))
    files = ModelFiles(path)
    ours = files.tokenizer.tokenizer.get_added_tokens_decoder()
    theirs = reference.added_tokens_decoder
    assert {key: each.content for key, each in ours.items()} == {
        key: each.content for key, each in theirs.items()
    }
    assert [each.special for _, each in sorted(ours.items())] == [
        each.special for _, each in sorted(theirs.items())
    ]
    assert files.tokenizer.encode([TEXT]) == reference.encode(TEXT, add_special_tokens=False)
    named = {key: str(each) for key, each in reference.special_tokens_map.items()}
    assert files.token_texts == {key: text for key, text in named.items() if key.endswith("_token")}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, (2, 0)),
        ({"generation_config.json": {"eos_token_id": 0}}, (0, 2)),  # the tokenizer's too
        ({"generation_config.json": {"eos_token_id": ...}}, (2,)),
        (
            {
                "generation_config.json": {"eos_token_id": 0},
                "config.json": {"eos_token_id": [5, 6]},
                "tokenizer_config.json": {"eos_token": ...},
            },
            (0, 5, 6),
        ),
        (
            {
                "generation_config.json": {"eos_token_id": ...},
                "config.json": {"text_config": {"eos_token_id": 7}},
                "tokenizer_config.json": {"eos_token": None},
            },
            (7,),
        ),
        (
            {
                "generation_config.json": {"eos_token_id": ...},
                "tokenizer_config.json": {"eos_token": ...},
                "special_tokens_map.json": {"eos_token": "<|endoftext|>"},
            },
            (0,),
        ),
    ],
)
def test_ends_of_answers(folder: Folder, files: dict[str, Any], expected: tuple[int, ...]) -> None:
    path = folder(files)
    assert end_token_ids(path) == expected == ModelFiles(path).end_token_ids
    assert load_vocabulary(path, vocab_size=None, eos_token_ids=end_token_ids(path))


@pytest.mark.parametrize(
    "fields",
    [
        {"added_tokens_decoder": [1]},
        {"added_tokens_decoder": {"x": EXTRA}},
        {"extra_special_tokens": [f"<{number}>" for number in range(20_000)]},
    ],
)
def test_tokens_that_are_none_are_rejected(folder: Folder, fields: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError):
        read_special_tokens(folder({"tokenizer_config.json": fields}))
