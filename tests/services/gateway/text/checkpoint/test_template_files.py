"""Which template of a folder a conversation gets, where there are several or none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from services.gateway.models.checked_model import checked_model
from services.gateway.models.served_text import process_setup
from services.gateway.structured.tools.family_choice import family_of
from services.gateway.text.model_files import ModelFiles
from shared.errors import ConfigError

PLAIN = "plain:{% for m in messages %}{{ m.content }}{% endfor %}"
TOOLS = "tools:{{ tools | length if tools }}<tool_call>{% for m in messages %}{% endfor %}"
NAMED = [{"name": "default", "template": PLAIN}, {"name": "tool_use", "template": TOOLS}]
USER = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
RESULT = {"role": "tool", "content": "1", "tool_call_id": "a"}


def folder(model_dir: Path, path: Path, files: dict[str, str], configured: Any = None) -> Path:
    for each in model_dir.iterdir():
        (path / each.name).write_bytes(each.read_bytes())
    fields = json.loads((path / "tokenizer_config.json").read_text())
    changed = {**fields, "chat_template": configured}
    (path / "tokenizer_config.json").write_text(json.dumps(changed))
    for name, text in files.items():
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_text(text)
    return path


def rendered(files: ModelFiles, *messages: Any, tools: tuple[Any, ...] = ()) -> str:
    assert files.chat_template is not None
    return "".join(files.chat_template.compiled().render(messages, tools))


@pytest.mark.parametrize(
    ("written", "configured"),
    [
        ({}, NAMED),
        ({"chat_template.jinja": PLAIN, "additional_chat_templates/tool_use.jinja": TOOLS}, None),
        ({"additional_chat_templates/tool_use.jinja": TOOLS}, PLAIN),
        ({"chat_template.jinja": PLAIN}, [{"name": "default", "template": "other"}, NAMED[1]]),
        ({"chat_template.json": json.dumps({"chat_template": NAMED})}, None),
    ],
)
def test_conversations_with_tools_get_their_own(
    model_dir: Path, tmp_path: Path, written: dict[str, str], configured: Any
) -> None:
    files = ModelFiles(folder(model_dir, tmp_path, written, configured))
    assert rendered(files, USER) == "plain:hi"
    assert rendered(files, USER, tools=(TOOL, TOOL)).startswith("tools:2")
    assert rendered(files, USER, RESULT).startswith("tools:")  # the other would leave it out
    assert family_of(files).name == "hermes"


@pytest.mark.parametrize(
    ("written", "configured", "expected"),
    [
        ({"chat_template.json": json.dumps({"chat_template": PLAIN})}, None, "plain:hi"),
        ({"chat_template.json": json.dumps({"chat_template": "old"})}, PLAIN, "plain:hi"),
        ({"additional_chat_templates/rag.jinja": "rag"}, PLAIN, "plain:hi"),
        ({}, [NAMED[0]], "plain:hi"),
        ({}, [NAMED[1]], "tools:<tool_call>"),
    ],
)
def test_other_conversations(
    model_dir: Path, tmp_path: Path, written: dict[str, str], configured: Any, expected: str
) -> None:
    assert rendered(ModelFiles(folder(model_dir, tmp_path, written, configured)), USER) == expected


def test_operators_file_is_in_place_of_all_others(model_dir: Path, tmp_path: Path) -> None:
    given = tmp_path / "given.jinja"
    given.write_text("own:{% for m in messages %}{{ m.content }}{% endfor %}")
    (tmp_path / "m").mkdir()
    path = folder(model_dir, tmp_path / "m", {"chat_template.jinja": PLAIN}, NAMED)
    assert rendered(ModelFiles(path, str(given)), USER) == "own:hi"
    checked = checked_model(path, "", "template", str(given))
    setup = process_setup(checked, "template")
    assert setup.template is not None and setup.template.source == given.read_text()
    assert setup.template_file == str(given)  # of the tokenizers in other processes
    with pytest.raises(ConfigError, match=r"cannot read .*none\.jinja"):
        ModelFiles(path, str(tmp_path / "none.jinja"))


def test_folder_without_one_is_reported(
    model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = ModelFiles(folder(model_dir, tmp_path, {}))
    assert files.chat_template is None
    assert "chat_template_missing" in capsys.readouterr().out
    (tmp_path / "chat_template.json").write_text("[")
    with pytest.raises(ConfigError, match=r"chat_template\.json"):
        ModelFiles(tmp_path)
