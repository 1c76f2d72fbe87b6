"""The README tells the truth: its paths exist, its figures are those of the committed results."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import typer

from benchmarks.readme_table import block, replaced
from services.__main__ import app

MACHINE = {"cpu": "AMD EPYC 9B14", "num_cpus": 2, "memory_gib": 24}
ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
PATH = re.compile(
    r"`((?:services|shared|kernels|tests|benchmarks|scripts)/[\w./-]*|[\w-]+\.(?:yml|toml)|LICENSE)`"
)


@pytest.mark.parametrize("path", sorted(set(PATH.findall(README))))
def test_path_exists(path):
    assert (ROOT / path).exists()


def test_figures_are_those_of_the_results():
    assert replaced(README) == README, "run: python -m benchmarks.readme_table --write"


def test_a_bar_in_a_cell_does_not_end_it():
    found = {"commit": "c", "command": "run", "machine": MACHINE, "rows": [{"name": "|x|"}]}
    assert r"| \|x\| |" in block(found, "title", {"what": "name"})


def test_every_option_of_a_command_exists():
    group = typer.main.get_command(app)
    used = re.findall(r"^(?:HEARTH_\S+ )?hearth ([\w-]+)([^#\n]*)", README, re.MULTILINE)
    assert used
    for name, rest in used:
        command = group.commands[name]
        if hasattr(command, "commands"):  # a group of commands: `hearth tenant add`
            command = command.commands[rest.split()[0]]
        options = (each.opts + each.secondary_opts for each in command.params)
        known = {option for each in options for option in each} | {"--help"}
        assert set(re.findall(r"--[\w-]+", rest)) <= known, name


def test_every_command_exists():
    scripts = set(re.findall(r"^(scripts/\w+)", README, re.MULTILINE))
    assert scripts == {"scripts/up", "scripts/test"}
