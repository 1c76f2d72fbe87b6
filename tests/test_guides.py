"""The guides are correct without a cluster: commands, links, configurations, quoted messages."""

from __future__ import annotations

import ast
import re
import subprocess
import tomllib
from typing import get_args

import pytest
import typer
import yaml

from services.__main__ import app
from services.gateway.tenancy.api_keys import RedisState
from tests import model_matrix
from tests.support import guide_blocks
from tests.support.guide_blocks import FOLDER, ROOT, Block
from tests.support.shell_commands import arguments_of, simple_commands

MAX_LINES = 150
MARK = re.compile(
    r"run|run: (long|regions|hosts|tls|tls elsewhere|sites|rotation( [a-z-]+)?)|not run: .{8,}|"
    r"output|clients: (agents|messages|sdks)|"
)
LINK = re.compile(r"\]\((?!https?://)([^)#]*)#([^)]+)\)")
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
READERS = {
    "python": ast.parse,
    "toml": tomllib.loads,
    "yaml": yaml.safe_load,
}
DEFAULT = re.compile(r"`(--[a-z-]+)` \((?:`HEARTH_\w+`, )?([\d,]+)( MiB)?\b")
BEFORE_OPTION = re.compile(r"\b([\d,]+)(?:( MiB)| s) \(`(--[a-z-]+)`\)")
FIRST_CELL = re.compile(r"^\| (`.*?) \|", re.MULTILINE)
QUOTED = re.compile(r"`([^`]+)`")
OF_THE_SYSTEM = {"No such file or directory"}
# names of events, fields, metrics and codes
NAME = re.compile(r"`([a-z][a-z0-9]*(?:_[a-z0-9]+)+)`")
FOREIGN_NAMES = {"trust_remote_code", "stop_grace_period", "runbook_url"}


def code_blocks(*languages: str) -> list[Block]:
    return [each for each in guide_blocks.all_blocks() if each.language in languages]


def test_guides_are_short():
    long = {each.name: len(each.read_text().splitlines()) for each in FOLDER.glob("*.md")}
    assert {name: lines for name, lines in long.items() if lines > MAX_LINES} == {}


def test_list_names_every_guide():
    listed = (FOLDER / "README.md").read_text()
    names = [each.name for each in FOLDER.glob("*.md") if each.name != "README.md"]
    assert [each for each in names if f"]({each})" not in listed] == []


def test_tables_of_models_are_those_of_the_code():
    assert model_matrix.PAGE.read_text() == model_matrix.written()
    assert model_matrix.REFERENCE.read_text() == model_matrix.written_reference()


def test_every_mark_is_known():
    assert [str(each) for each in guide_blocks.all_blocks() if not MARK.fullmatch(each.mark)] == []


def test_every_shell_block_runs_or_says_why_not():
    assert [str(each) for each in code_blocks("sh") if not each.mark] == []


def test_links_to_headings_lead_to_one():
    missing = []
    for guide in guide_blocks.guides():
        for name, anchor in LINK.findall(guide.read_text()):
            target = guide.parent / name if name else guide
            if anchor not in {anchor_of(each) for each in HEADING.findall(target.read_text())}:
                missing.append(f"{guide.name}: {name}#{anchor}")
    assert missing == []


def anchor_of(heading: str) -> str:
    """Returns GitHub's name of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def test_every_command_exists():
    """Subcommands, options and the number of arguments are those that `hearth` takes."""
    group = typer.main.get_command(app)
    problems = []
    for block in code_blocks("sh"):
        for words in simple_commands(block.text):
            arguments = arguments_of("hearth", words)
            if arguments is not None:
                problems += [f"{block}: {each}" for each in problems_of(group, arguments)]
    assert problems == []


def problems_of(command: typer.core.TyperCommand, arguments: list[str]) -> list[str]:
    while hasattr(command, "commands"):
        name, *arguments = arguments or [""]
        if name.startswith("--"):  # an option of `hearth` itself
            return []
        if name not in command.commands:
            return [f"no command {name!r}"]
        command = command.commands[name]
    if arguments == ["--help"]:
        return []
    context = command.make_context(None, [], resilient_parsing=True)
    context.resilient_parsing = False
    parser = command.make_parser(context)
    try:
        given, rest, _ = parser.parse_args(list(arguments))
    except Exception as error:  # of the parser's own kinds
        return [f"{command.name}: {error}"]
    required = {each.name for each in command.params if each.param_type_name == "argument"}
    required &= {each.name for each in command.params if each.required}
    missing = sorted(name for name in required if not given.get(name))
    return [f"{command.name}: {each!r} is too much" for each in rest] + [
        f"{command.name}: no {each}" for each in missing
    ]


def test_wrong_commands_are_found():
    group = typer.main.get_command(app)
    assert problems_of(group, ["sttaus"]) == ["no command 'sttaus'"]
    assert problems_of(group, ["status", "--onec"]) != []
    assert problems_of(group, ["status", "extra"]) == ["status: 'extra' is too much"]
    assert problems_of(group, ["role", "worker-1"]) == ["role: no roles"]
    assert problems_of(group, ["tenant", "add", "team-a", "--concurrency", "16"]) == []


def test_defaults_in_parentheses_are_those_of_some_command():
    """Such as `--stale-s` (300 s), and 300 s (`--stale-s`)."""
    defaults = options_of(typer.main.get_command(app))
    pages = [*guide_blocks.guides(), ROOT / "services/gateway/OPERATING.md"]
    found = []
    for page in pages:
        text = page.read_text()
        named = [*DEFAULT.findall(text), *((o, n, u) for n, u, o in BEFORE_OPTION.findall(text))]
        for option, number, unit in named:
            found.append((page.name, option, int(number.replace(",", "")) * (2**20 if unit else 1)))
    assert len(found) > 12
    assert [each for each in found if each[2] not in defaults[each[1]]] == []


def options_of(command: typer.core.TyperCommand) -> dict[str, set[object]]:
    """Returns the defaults of each option, of all commands."""
    found: dict[str, set[object]] = {}
    for each in getattr(command, "commands", {}).values():
        for name, defaults in options_of(each).items():
            found.setdefault(name, set()).update(defaults)
    for parameter in command.params:
        for name in parameter.opts:
            found.setdefault(name, set()).add(parameter.default)
    return found


def test_guides_print_one_configuration_for_the_keys_of_several_hosts():
    """Else a reload locks out those that a later page leaves out."""
    named: dict[str, set[str]] = {}
    for block in code_blocks("sh"):
        for words in simple_commands(block.text):
            if words[:2] == ["hearth", "nats-config"] and "10.0.0.1" in words and "keys" in words:
                named[str(block)] = {each for each in words if re.fullmatch(r"\w+=[\w-]+", each)}
    assert len(named) == 3
    assert [place for place, names in named.items() if names != set.union(*named.values())] == []


def test_programs_and_files_exist():
    missing = [
        f"{block}: {word}"
        for block in code_blocks("sh")
        for words in simple_commands(block.text)
        for word in words
        if word.startswith(("scripts/", "services/", "shared/", "tests/"))
        and not (ROOT / word).exists()
    ]
    assert missing == []


def test_shell_blocks_have_the_syntax_of_bash():
    for block in code_blocks("sh"):
        done = subprocess.run(["bash", "-n"], input=block.text, text=True, capture_output=True)
        assert done.returncode == 0, f"{block}: {done.stderr}"


@pytest.mark.parametrize(("language", "read"), list(READERS.items()))
def test_blocks_have_the_syntax_of_their_language(language, read):
    blocks = code_blocks(language)
    assert blocks
    for block in blocks:
        try:
            read(block.text)
        except (SyntaxError, ValueError, yaml.YAMLError) as error:
            pytest.fail(f"{block}: {error}")


def test_quoted_messages_occur_in_the_source(source: str):
    """In troubleshooting.md, … stands for what differs from case to case."""
    cells = FIRST_CELL.findall((FOLDER / "troubleshooting.md").read_text())
    quoted = {each for cell in cells for each in QUOTED.findall(cell)} - OF_THE_SYSTEM
    assert len(quoted) > 60
    missing = [
        each for each in quoted if not all(part.strip() in source for part in each.split("…"))
    ]
    assert missing == []


def test_names_of_events_metrics_and_fields_occur_in_the_source(source: str):
    records = (ROOT / "tests/surface/records").glob("metrics_of_*.txt")
    known = set(re.findall(r"\w+", " ".join([source, *(each.read_text() for each in records)])))
    pages = [*guide_blocks.guides(), ROOT / "services/gateway/OPERATING.md"]
    pages.append(ROOT / "services/deploy/README.md")
    named = {(page.name, name) for page in pages for name in NAME.findall(page.read_text())}
    assert len(named) > 100
    unknown = [each for each in named if not known & forms_of(each[1])]
    assert [each for each in unknown if each[1] not in FOREIGN_NAMES] == []
    assert not known & (forms_of("hearth_wanted_wokers_total") | forms_of("worker_stated"))


def forms_of(name: str) -> set[str]:
    """Returns the name, and it as the source has it: without the unit that is put behind it."""
    return {name, name.removesuffix("_total"), name.removesuffix("_s")}


def test_every_state_of_redis_is_in_the_guide_of_operators():
    (line,) = re.findall(r"^.*`redis` says.*$", (FOLDER / "operating.md").read_text(), re.MULTILINE)
    states = {*get_args(RedisState), "rejects writes"}
    assert states - set(QUOTED.findall(line)) == set()


@pytest.fixture(scope="module")
def source() -> str:
    return " ".join(
        _joined(path.read_text())
        for folder in ("services", "shared", "kernels")
        for path in (ROOT / folder).rglob("*.py")
    )


def _joined(code: str) -> str:
    """Returns code whose adjacent strings are one."""
    return re.sub(r'"\s*\n\s*f?"', "", code)
