from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from services.cli.cluster.service_options import DEMO_MODELS
from tests.services.cli.in_process import ROOT, call_hearth


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


def test_commands_know_the_models_that_come_with_hearth() -> None:
    for name, folder in DEMO_MODELS.items():
        shown = [call_hearth(("plan", "--model", str(it)), {}).stdout for it in (name, folder)]
        assert shown[0] == shown[1] != ""
    commands = (ROOT / "services/cli").rglob("*.py")
    assert [each.name for each in commands if re.search(r"\blocal_copy\b", each.read_text())] == [
        "service_options.py"
    ]


def test_plan_with_a_cache_in_fp8_has_twice_the_tokens() -> None:
    def kv_tokens(*arguments: str) -> int:
        shown = call_hearth(("plan", "--kv-memory", "64MiB", "--json", *arguments), {})
        found: int = json.loads(shown.stdout)["kv_tokens"]
        return found

    assert kv_tokens("--kv-dtype", "fp8") >= 1.98 * kv_tokens("--kv-dtype", "bf16")
    assert kv_tokens("--kv-dtype", "auto") == kv_tokens()
    for arguments, message in (
        (("--kv-dtype", "int8"), "kv_dtype 'int8' is none of auto, bf16, fp8"),
        (("--kv-dtype", "bf16", "--dtype", "float32"), "kv_dtype bf16 needs activations in bf"),
    ):
        shown = call_hearth(("plan", *arguments), {})
        assert (shown.returncode, message in shown.stderr) == (2, True)


def test_files_of_a_checkpoint_are_counted() -> None:
    shown = call_hearth(("plan", "--kv-memory", "64MiB"), {"COLUMNS": "200"})
    assert " tensors in 1 file of " in shown.stdout


def test_plan_that_does_not_fit_is_one_line() -> None:
    shown = call_hearth(("plan", "--memory", "3MiB"), {})
    assert shown.returncode == 2
    assert "hearth: rank 0 of stage 0 needs 9.4 MiB for weights" in shown.stderr


LINKS = """
hosts = [{ name = "a", num_ranks = 2 }, { name = "b", num_ranks = 2, device = "cuda" }]
links = [{ hosts = ["a", "b"], link = { latency_s = 0.01, bytes_per_s = 125e6 } }]
"""


@pytest.fixture
def links(tmp_path: Path) -> str:
    (tmp_path / "links.toml").write_text(LINKS)
    return str(tmp_path / "links.toml")


def test_plan_over_links_shows_the_choice_and_the_alternatives(links: str) -> None:
    shown = hearth_plan("--links", links, "--batch", "8", "--json")
    assert shown.returncode == 0, shown.stderr
    assert not [line for line in shown.stderr.splitlines() if line.endswith("| torch")]
    plan = json.loads(shown.stdout)
    assert [(each["tp"], each["pp"]) for each in plan["plans"]] == [(1, 4), (2, 2), (4, 1)]
    assert [each["is_chosen"] for each in plan["plans"]] == [False, True, False]
    assert [each["host_exchanges"] for each in plan["plans"]] == [1, 1, 14]
    pushes = {tuple(each["hosts"]): each for each in plan["pushes"]}
    assert {pair: (each["port"], each["place"]) for pair, each in pushes.items()} == {
        ("a", "a"): ("memfd", "same host"),
        ("a", "b"): ("tcp", "other host"),
        ("b", "b"): ("memfd", "peer GPUs"),
    }
    over_wire = pushes["a", "b"]
    assert over_wire["predicted_s"] == pytest.approx(0.01 + over_wire["num_bytes"] / 125e6)
    assert over_wire["frame_bytes"] == 16 << 20 > pushes["a", "a"]["frame_bytes"]
    assert [each["layers"] for each in plan["ranks"]] == [[0, 3], [0, 3], [3, 6], [3, 6]]


def test_plan_that_was_asked_for_is_compared_with_the_chosen_one(links: str) -> None:
    shown = call_hearth(("plan", "--links", links, "--tp", "4"), {"COLUMNS": "200"})
    assert "tp 4 x pp 1 was asked for; a step of it takes" in shown.stdout
    assert "gather, send, receive, to device, scatter on the device" in " ".join(
        shown.stdout.split()
    )


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("--tp", "3"), "tp 3 x pp 1 is no plan for all ranks of these hosts: tp 1 x pp 4"),
        (("--activations", "fp8"), "activations 'fp8' is not plain or bf16-exchange"),
        (("--links", "/none.json"), "/none.json: No such file or directory"),
    ],
)
def test_plan_over_links_that_cannot_be_is_one_line(
    links: str, arguments: tuple[str, ...], error: str
) -> None:
    shown = call_hearth(("plan", "--links", links, *arguments), {})
    assert shown.returncode == 2
    assert shown.stderr.startswith(f"hearth: {error}") and shown.stderr.count("\n") == 1
