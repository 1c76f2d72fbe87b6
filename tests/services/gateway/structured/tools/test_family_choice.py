"""How a model's family is chosen: by the operator, the checkpoint, or its chat template."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from services.gateway.models.served_text import template_source
from services.gateway.structured.tools.families import HERMES, KIMI, MISTRAL_ARGS
from services.gateway.structured.tools.family_choice import family_of
from services.gateway.text.chat_template import TemplateSource
from services.gateway.text.model_files import ModelFiles
from shared.errors import ConfigError

OWN: dict[str, Any] = {
    "defaults": {"role": "assistant"},
    "fields": {
        "content": {},
        "thinking": {"open": "<reason>", "close": "</reason>"},
        "tool_calls": {
            "open": "<call>",
            "close": "</call>",
            "content": "json",
            "transform": {"function": {"name": "{content.name}", "arguments": "{content.args}"}},
        },
    },
}
WITH_TOOLS = "{{ tools }}"


def files_of(model_files: ModelFiles, source: str | None, own: Any = None) -> ModelFiles:
    files = copy.copy(model_files)
    files.response_template = own
    files.chat_template = None if source is None else TemplateSource(source, (), {})
    return files


def test_by_the_chat_template(model_files: ModelFiles) -> None:
    found = family_of(files_of(model_files, WITH_TOOLS + "<tool_call> </think>"))
    assert (found.name, found.think_close) == ("hermes", "</think>")
    assert family_of(files_of(model_files, None)).call_format is None


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("<tool_call>{name} <arg_key>{key}</arg_key> <arg_value>", "glm"),
        ("<|header_start|> [func_name1(params_name1=params_value1)] <|python_start|>", "pythonic"),
        ('<|header_start|> {"name": name, "parameters": object} <|python_start|>', "llama_json"),
    ],
)
def test_templates_that_resemble_others(model_files: ModelFiles, source: str, name: str) -> None:
    """Llama 4: Meta's asks for JSON, others for Python: each gets the form that it asks for."""
    assert family_of(files_of(model_files, WITH_TOOLS + source)).name == name


def test_the_checkpoint_has_its_own(model_files: ModelFiles) -> None:
    files = files_of(model_files, WITH_TOOLS + "<tool_call>", OWN)
    found = family_of(files)
    assert found.response_template == OWN
    assert (found.think_open, found.call_format) == ("<reason>", "hermes")
    fields = {name: each for name, each in OWN["fields"].items() if name == "content"}
    files.response_template = {**OWN, "fields": fields}
    assert (family_of(files).think_open, family_of(files).call_format) == ("", None)


def test_one_that_we_cannot_read_is_not_used(model_files: ModelFiles) -> None:
    files = files_of(model_files, WITH_TOOLS + "<tool_call>", {"fields": {}, "version": 9})
    assert family_of(files) == HERMES


def test_that_of_the_checkpoint_is_read_from_its_files(model_dir: Path, tmp_path: Path) -> None:
    for each in model_dir.iterdir():
        (tmp_path / each.name).write_bytes(each.read_bytes())
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config["response_template"] = OWN
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert family_of(ModelFiles(tmp_path)).response_template == OWN


def test_choice_of_the_operator_is_used(model_files: ModelFiles, tmp_path: Path) -> None:
    files = files_of(model_files, WITH_TOOLS + "<tool_call>", OWN)
    assert family_of(files, "mistral_args") == MISTRAL_ARGS
    (tmp_path / "own.json").write_text(json.dumps({**OWN, "version": 1}))
    assert family_of(files, str(tmp_path / "own.json")).response_template == {**OWN, "version": 1}
    kimi = files_of(model_files, WITH_TOOLS + "<|tool_calls_section_begin|>")
    assert (family_of(kimi, "off").call_format, family_of(kimi, "off").call_ids) == (None, "kimi")
    assert family_of(kimi) == KIMI


@pytest.mark.parametrize(
    ("text", "match"),
    [(None, "neither a file nor one of off, hermes"), ("{", "cannot read"), ("{}", "fields")],
)
def test_bad_choice(model_files: ModelFiles, tmp_path: Path, text: str | None, match: str) -> None:
    path = tmp_path / "own.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=match):
        family_of(model_files, str(path))


def test_a_template_without_tools_gets_hermes(model_files: ModelFiles) -> None:
    plain = files_of(model_files, "{{ messages }}")
    assert family_of(plain, tool_format="hermes") == HERMES
    assert family_of(plain).call_format is None
    known = files_of(model_files, WITH_TOOLS + "[TOOL_CALLS][ARGS]")
    assert family_of(known, tool_format="hermes") == MISTRAL_ARGS


def test_call_ids_of_the_prompt_are_of_the_chosen_family(
    model_files: ModelFiles,
) -> None:
    source = template_source(model_files, family_of(model_files, "kimi"), "template")
    assert source is not None and source.call_ids == "kimi"
