"""Tables in a narrow terminal: cells are folded, and no text is lost."""

from __future__ import annotations

import re

import pytest
from rich.console import Console

from services.cli.fleet.fitted_table import Column, fitted_table
from services.cli.operators.audit_table import show_audit
from services.cli.output import plain_table, show
from shared.engine.models import FAMILIES
from shared.tenancy.audit import AuditLine
from tests.services.cli.in_process import ROOT, call_hearth

OWN_TABLES = {"output.py", "fitted_table.py", "timeline_table.py", "compression_progress.py"}


@pytest.mark.parametrize("arguments", [("models",), ("models", "--supported")])
def test_architectures_are_whole_at_80_columns(arguments: tuple[str, ...]) -> None:
    shown = call_hearth(arguments, {"COLUMNS": "80"}).stdout
    assert "…" not in shown and max(map(len, shown.splitlines())) <= 80
    assert FAMILIES.keys() <= set(shown.split())


def test_supported_names_what_must_be_dense() -> None:
    shown = call_hearth(("models", "--supported"), {"COLUMNS": "200"}).stdout
    rows = dict(re.findall(r"^(\w+) {2,}(.*\S) *$", shown, re.MULTILINE))
    assert rows["LlamaForCausalLM"] == "all; no MXFP4"
    assert rows["GptOssForCausalLM"] == "without stacked experts; experts alone in MXFP4"
    rotary = "without rotary projections in INT4 with zeros, AWQ, GPTQ"
    assert rows["DeepseekV3ForCausalLM"] == f"all; {rotary}; no MXFP4"


def test_cells_are_folded() -> None:
    words = ("name", "value", "a-word-of-20-letters", "another-word-of-24-chars")
    table = plain_table(*words[:2])
    table.add_row(*words[2:])
    console = Console(width=20)
    with console.capture() as captured:
        console.print(table)
    assert sorted("".join(captured.get().split())) == sorted("".join(words))


@pytest.mark.parametrize("name", ["a[/b]", "[red]x", "a:fire:b", r"\[x]"])
def test_names_are_shown_as_they_are(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A console obeys markup by default, and fails with some: the table is never shown again."""
    line = AuditLine(at=0, who=name, command="model alias", arguments=name, outcome="done")
    show_audit([line])
    columns = (Column("name", lambda each: each),)
    show(fitted_table(columns, [name], 80), plain_table(name), name)
    assert capsys.readouterr().out.count(name) == 5


def test_commands_have_no_other_consoles() -> None:
    pattern = re.compile(r"(?<!\w)Console\(")
    files = (ROOT / "services/cli").rglob("*.py")
    assert [each.name for each in files if pattern.search(each.read_text())] == ["output.py"]


def test_commands_have_no_tables_that_cut() -> None:
    """rich's own default cuts a cell that does not fit."""
    others = [
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "services/cli").rglob("*.py")
        if path.name not in OWN_TABLES and re.search(r"(?<!\w)Table\(", path.read_text())
    ]
    assert others == []
