from __future__ import annotations

import json
import subprocess
import sys

import pytest

from services.cli.plan.plan_command import parse_bytes
from shared.errors import ConfigError


def hearth_plan(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-X", "importtime", "-m", "services", "plan", *arguments]
    return subprocess.run(command, capture_output=True, text=True)


def test_plan_of_the_demo_model_loads_no_torch() -> None:
    shown = hearth_plan("--tp", "2", "--pp", "2", "--memory", "1GiB", "--json")
    assert shown.returncode == 0, shown.stderr
    assert not [line for line in shown.stderr.splitlines() if line.endswith("| torch")]
    plan = json.loads(shown.stdout)
    assert [each["layers"] for each in plan["ranks"]] == [[0, 3], [0, 3], [3, 6], [3, 6]]
    assert plan["kv_tokens"] == min(each["kv_tokens"] for each in plan["ranks"]) > 100_000


def test_plan_that_does_not_fit_is_one_line() -> None:
    shown = hearth_plan("--memory", "3MiB")
    assert shown.returncode == 2
    assert "hearth: rank 0 of stage 0 needs 9.4 MiB for weights" in shown.stderr


@pytest.mark.parametrize(
    ("text", "num_bytes"), [("80GiB", 80 << 30), ("1.5 gb", 1_500_000_000), ("4096", 4096)]
)
def test_sizes_are_read(text: str, num_bytes: int) -> None:
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize("text", ["", "much", "80GiBs", "-1GiB", "1e9"])
def test_other_sizes_are_an_error(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a size such as 80GiB"):
        parse_bytes(text)
