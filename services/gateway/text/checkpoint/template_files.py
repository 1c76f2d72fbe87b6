"""Finds the chat templates of a folder: one, or several with names."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import msgspec

from shared.errors import ConfigError
from shared.tokenizer.checkpoint_file import (
    UNREADABLE,
    exists,
    read_checkpoint_file,
    reason_of,
)

TEMPLATE_FILE, OLD_FILE = "chat_template.jinja", "chat_template.json"
FOLDER = "additional_chat_templates"
MAX_TEMPLATE_BYTES = 1 << 20
MAX_TEMPLATES = 64

Named = list[dict[str, str]]


class _OldFile(msgspec.Struct, frozen=True):
    """The file that older models with images have."""

    chat_template: str | Named | dict[str, str] | None = None


class Templates(NamedTuple):
    """`source`: the template, or None. `for_tools`: the template of conversations with tools; None:
    the same.
    """

    source: str | None
    for_tools: str | None = None

    @property
    def text(self) -> str:
        return "\n".join(filter(None, (self.for_tools, self.source)))


def read_templates(model_dir: Path, configured: str | Named | None, given: str = "") -> Templates:
    """Reads the templates. `configured`: those in `tokenizer_config.json`; files take precedence,
    as in transformers. `given`: an operator's file in place of all of them. Raises ConfigError.
    """
    if given:
        return Templates(_read(Path(given)).decode())
    named = {**_by_name(configured), **_files(model_dir)} or _by_name(_old(model_dir / OLD_FILE))
    only = next(iter(named.values())) if len(named) == 1 else None
    return Templates(named.get("default", only), named.get("tool_use"))


def _by_name(given: str | Named | dict[str, str] | None) -> dict[str, str]:
    match given:
        case None:
            return {}
        case str():
            return {"default": given}
        case dict():
            return given
    return {
        each["name"]: each["template"] for each in given if "name" in each and "template" in each
    }


def _files(model_dir: Path) -> dict[str, str]:
    paths = {"default": model_dir / TEMPLATE_FILE}
    folder = model_dir / FOLDER
    if folder.is_dir():
        found = sorted(folder.glob("*.jinja"))[:MAX_TEMPLATES]
        paths |= {path.name.removesuffix(".jinja"): path for path in found}
    return {name: _read(path).decode() for name, path in paths.items() if exists(path)}


def _old(path: Path) -> str | Named | dict[str, str] | None:
    if not exists(path):
        return None
    try:
        return msgspec.json.decode(_read(path), type=_OldFile).chat_template
    except UNREADABLE as error:
        raise ConfigError(f"cannot read {path}: {reason_of(error)}") from None


def _read(path: Path) -> bytes:
    """Reads UTF-8 text. Raises ConfigError."""
    try:
        data = read_checkpoint_file(path, max_bytes=MAX_TEMPLATE_BYTES)
        data.decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {reason_of(error)}") from None
    return data
