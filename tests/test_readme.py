"""The READMEs are correct: paths and commands exist, figures equal the committed results."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

from benchmarks import readme_table
from benchmarks.gpu_results.runs import RESULTS, stored_runs
from services.__main__ import app
from tests import error_table

MACHINE = {"cpu": "AMD EPYC 9B14", "num_cpus": 2, "memory_gib": 24}
ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("services", "shared", "kernels", "benchmarks", "tests", "scripts")
NAMES = ("README.md", "API.md", "OPERATING.md")
MAX_FRONT_BYTES = 8 << 10
MAX_MAP_LINES = 40
MAX_FILES_WITHOUT_MAP = 8
PATH = re.compile(
    r"`((?:services|shared|kernels|tests|benchmarks|scripts)/[\w./-]*|[\w/]+\.(?:py|md|yml|toml)"
    r"|[\w/]+/|LICENSE|Dockerfile)`"
)
LINK = re.compile(r"\]\((?!https?://|#)([^)#]+)[^)]*\)")
PICTURE = re.compile(r"!\[[^]]+\]\(([^)]+)\)")
MAX_PICTURE_BYTES = 200_000
HEARTH = re.compile(r"(?:^|`)(?:HEARTH_\S+ )?hearth (\w[\w-]*)([^#\n`]*)", re.MULTILINE)
SCRIPT = re.compile(r"(?:^|`)(scripts/[\w.]+)", re.MULTILINE)
MODULE = re.compile(r"python -m ((?:benchmarks|tests|services)[\w.]*)")
OPTION = re.compile(r"`(--[\w-]+)[^`]*`")
REPEATED = re.compile(r"\d\.\d\d to \d\.\d\d|[\d,]+ streams, \d+ faults, \d+ lost, \d+ altered")
FOREIGN_OPTIONS = {"--profile", "--migration-limit"}  # of docker compose and Dynamo


def readmes() -> list[Path]:
    folders = [ROOT / name for name in FOLDERS]
    found = [path for each in folders for name in NAMES for path in sorted(each.rglob(name))]
    assert len(found) > 20
    return [ROOT / "README.md", *found, *sorted((ROOT / "services/guides").glob("*.md"))]


def found_in_readmes(pattern: re.Pattern[str]) -> Iterator[tuple[Path, re.Match[str]]]:
    for readme in readmes():
        for match in pattern.finditer(readme.read_text()):
            yield readme, match


def located(readme: Path, text: str) -> str:
    return f"{readme.relative_to(ROOT)}: {text}"


def test_every_path_exists():
    """Paths are relative to the repository's root or to the README's folder."""
    missing = [
        located(readme, path)
        for readme, match in found_in_readmes(PATH)
        if not (ROOT / (path := match[1])).exists() and not (readme.parent / path).exists()
    ]
    assert missing == []


def test_every_link_leads_to_a_file():
    missing = [
        located(readme, match[1])
        for readme, match in found_in_readmes(LINK)
        if not (readme.parent / match[1]).exists()
    ]
    assert missing == []


def test_every_picture_exists_and_is_small():
    pictures = [readme.parent / match[1] for readme, match in found_in_readmes(PICTURE)]
    assert pictures
    assert [path for path in pictures if not path.exists()] == []
    assert [path for path in pictures if path.stat().st_size > MAX_PICTURE_BYTES] == []


def test_figures_equal_the_committed_results():
    stale = [path for path, text in readme_table.written().items() if path.read_text() != text]
    assert stale == [], "run: python -m benchmarks.readme_table --write"


def test_figures_in_prose_are_those_of_the_results():
    guide = " ".join((ROOT / "services/guides/comparison.md").read_text().split())
    repeated = REPEATED.findall(guide)
    assert len(repeated) == 3
    summary = readme_table.summary()
    assert [each for each in repeated if each not in summary] == []
    front = " ".join((ROOT / "README.md").read_text().split())
    pauses = decode_pauses()
    assert f"at most {pauses['kill']} s later, {pauses['freeze']} s if it froze" in front
    bars = readme_table.result("adversity")["bars"]
    (crowded,) = [each["value"] for each in bars if "beside 64 streams" in each["name"]]
    assert f"raises another's p99 TTFT {crowded:.1f} x" in front


def decode_pauses() -> dict[str, float]:
    """Returns the longest pauses by fault, in tenths of a second, rounded up."""
    rows = readme_table.worst_of(readme_table.result("chaos")["rows"])
    of_decode = [each for each in rows if each["process"] == "decode-1"]
    return {each["fault"]: math.ceil(each["pause_s"] * 10) / 10 for each in of_decode}


def test_figures_of_a_gpu_in_its_guide_are_the_newest():
    rows = {
        (row["part"], row["case"], row.get("context")): row
        for run in stored_runs(ROOT / RESULTS)
        for row in run.rows
        if run.card == "h200" and "case" in row
    }
    expected = []
    for batch in (1, 8, 64, 256):
        steps = [rows[f"8b_{mode}", f"decode, batch {batch}", 2048] for mode in ("fast", "exact")]
        shown = (f"{row['measured_ms']:#.3g} ms, {row['of_roofline']:.2f}" for row in steps)
        expected.append(f"batch {batch} | {' | '.join(shown)} |")
    for part, case in (("serve", "both"), ("serve_apart", "apart")):
        for users in (1, 16):
            row = rows[part, f"{case}, {users} at a time", None]
            expected += [
                f"TTFT {row['ttft_p50_ms']:.0f} ms, ",
                f" {row['tokens_per_s']:,.0f} tokens/s",
            ]
    starts = (rows["serve", "both, start", None], rows["serve_apart", "apart, start", None])
    expected.append(" | " + ", ".join(f"{row['seconds']:.0f} s" for row in starts) + " |")
    guide = (ROOT / "services/guides/gpus_and_sizes.md").read_text()
    assert [each for each in expected if each not in guide] == []


def test_error_table_equals_the_error_classes():
    stale = [path for path, text in error_table.written().items() if path.read_text() != text]
    assert stale == [], "run: python -m tests.error_table --write"


def test_no_table_is_empty():
    header_alone = re.compile(r"^\|[ |-]*---[ |-]*\|\n(?!\|)", re.MULTILINE)
    assert [located(readme, match[0]) for readme, match in found_in_readmes(header_alone)] == []


def test_result_without_rows_raises():
    found = {"commit": "c", "command": "run", "machine": MACHINE, "rows": []}
    with pytest.raises(ValueError, match="would have no rows"):
        readme_table.block(found, "title", {"what": "name"})


@pytest.mark.parametrize("commit", ["c-dirty", "unknown"])
def test_result_of_an_uncommitted_tree_raises(commit):
    found = {"commit": commit, "command": "run", "machine": MACHINE, "rows": [{"name": "x"}]}
    with pytest.raises(ValueError, match="uncommitted tree"):
        readme_table.block(found, "title", {"what": "name"})


def test_missed_bars_without_a_table_are_shown():
    bars = [
        {"name": name, "value": 2, "bar": 1, "unit": "s", "holds": name == "a"} for name in "ab"
    ]
    shown = readme_table.missed({"chaos": {"commit": "c", "bars": bars}})
    assert shown.splitlines()[4:] == ["| chaos | b | 2 | 1 | s | `c` |"]


def test_bar_in_a_table_cell_is_escaped():
    found = {"commit": "c", "command": "run", "machine": MACHINE, "rows": [{"name": "|x|"}]}
    assert r"| \|x\| |" in readme_table.block(found, "title", {"what": "name"})


def test_root_readme_is_short():
    assert (ROOT / "README.md").stat().st_size <= MAX_FRONT_BYTES


def test_large_folders_have_a_short_map():
    """The map is the part of a README before its first section."""
    folders = {path.parent for name in FOLDERS[:4] for path in (ROOT / name).rglob("*.py")}
    large = [each for each in folders if len(list(each.glob("*.py"))) > MAX_FILES_WITHOUT_MAP]
    missing = [each for each in large if not (each / "README.md").exists()]
    assert missing == []
    for readme in filter(lambda each: each.name == "README.md", readmes()[1:]):
        map_lines, *_ = re.split(r"^## ", readme.read_text(), maxsplit=1, flags=re.MULTILINE)
        assert len(map_lines.splitlines()) <= MAX_MAP_LINES, located(readme, "the map is too long")


def test_map_of_a_folder_names_all_its_modules_and_folders():
    missing = []
    for readme in (found for name in FOLDERS[:3] for found in (ROOT / name).rglob("README.md")):
        text, folder = readme.read_text(), readme.parent
        modules = [each.name for each in folder.glob("[!_]*.py")]
        below = [f"{each.parent.name}/" for each in folder.glob("*/__init__.py")]
        missing += [located(readme, each) for each in modules + below if each not in text]
    assert missing == []


def test_every_option_of_a_command_exists():
    group = typer.main.get_command(app)
    unknown = []
    for readme, match in found_in_readmes(HEARTH):
        name, rest = match.groups()
        command = group.commands[name]
        words = rest.split()
        if hasattr(command, "commands") and words:  # a group of commands: `hearth tenant add`
            command = command.commands[words[0]]
        options = set(re.findall(r"--[\w-]+", rest)) - options_of(command)
        unknown += [located(readme, f"hearth {name} {each}") for each in options]
    assert unknown == []


def test_every_option_in_services_readmes_exists():
    """Each option belongs to any command or service."""
    known = set(FOREIGN_OPTIONS)
    for command in typer.main.get_command(app).commands.values():
        for each in getattr(command, "commands", {"": command}).values():
            known |= options_of(each)
    unknown = [
        located(readme, match[1])
        for readme, match in found_in_readmes(OPTION)
        if (ROOT / "services") in readme.parents and match[1] not in known
    ]
    assert unknown == []


def options_of(command) -> set[str]:
    options = (each.opts + each.secondary_opts for each in command.params)
    return {option for each in options for option in each} | {"--help"}


def test_every_script_and_module_exists():
    front = (ROOT / "README.md").read_text()
    assert {"scripts/up", "scripts/test"} <= set(SCRIPT.findall(front))
    missing = [located(*each) for each in missing_programs()]
    assert missing == []


def missing_programs() -> Iterator[tuple[Path, str]]:
    for readme, match in found_in_readmes(SCRIPT):
        if not (ROOT / match[1]).exists():
            yield readme, match[1]
    for readme, match in found_in_readmes(MODULE):
        path = ROOT.joinpath(*match[1].rstrip(".").split("."))
        if not path.with_suffix(".py").exists() and not (path / "__main__.py").exists():
            yield readme, match[1]
