"""A directory of Kimi K2: no `tokenizer.json`, special tokens of its own, a template with tools."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest
import tiktoken

from services.gateway.structured.tools.families import KIMI as KIMI_FAMILY
from services.gateway.structured.tools.family_choice import family_of
from services.gateway.text.chat_template import LiteralText
from services.gateway.text.model_files import ModelFiles
from shared.errors import ConfigError
from shared.tokenizer.tiktoken_model import KIMI
from tests.shared.tokenizer.test_tokenizer_file import LINES, trained_ranks, write_config

TEMPLATE = """{%- if tools -%}<|im_system|>tools<|im_middle|>{{ tools }}<|im_end|>{%- endif -%}
{%- for message in messages -%}<|im_user|>{{ message.content }}<|im_end|>{%- endfor -%}
{#- <|tool_calls_section_begin|> <think></think> -#}"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    ranks = trained_ranks(300)
    model = b"".join(base64.b64encode(token) + b" %d\n" % rank for token, rank in ranks.items())
    (tmp_path / "tiktoken.model").write_bytes(model)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    write_config(tmp_path, len(ranks))
    return tmp_path


def test_texts_and_calls_are_those_of_kimi(folder: Path) -> None:
    files = ModelFiles(folder)
    ranks = trained_ranks(300)
    own = tiktoken.Encoding("kimi", pat_str=KIMI, mergeable_ranks=ranks, special_tokens={})
    for line in LINES:
        assert files.tokenizer.encode([line]) == own.encode_ordinary(line)
        assert files.tokenizer.encode_with_offsets(line, add_special_tokens=True)[0] == (
            own.encode_ordinary(line)
        )
    end = files.tokenizer.added_token_id("<|im_end|>")
    assert files.tokenizer.encode(["a<|im_end|>"])[-1] == end
    assert end not in files.tokenizer.encode([LiteralText("a<|im_end|>")])
    family = family_of(files)
    assert family.name == KIMI_FAMILY.name
    assert (family.think_open, family.think_close) == ("<think>", "</think>")


def test_code_of_a_checkpoint_is_never_run(folder: Path) -> None:
    (folder / "tiktoken.model").unlink()
    with pytest.raises(ConfigError, match="is code of the checkpoint, which is never run"):
        ModelFiles(folder)
