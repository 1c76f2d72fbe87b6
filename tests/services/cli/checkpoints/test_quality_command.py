"""`hearth quality`: its figures, and one line for each bad input."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from services.cli.checkpoints.quality_prompts import Prompt, read_prompts
from tests.services.cli.in_process import call_hearth
from tests.support.engine.quantized import quantize
from tests.support.grids import in_one_test

DEMO = "shared/demo_model"
TEXTS = ["What is the KV cache?", "[b]What[/b] is Hearth?"]


def quality(*arguments: str, model: str = DEMO) -> tuple[int, str, str]:
    ran = call_hearth(("quality", model, "--device", "cpu", *arguments), {"COLUMNS": "160"})
    return ran.returncode, ran.stdout, ran.stderr


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    rows = [*TEXTS, {"prompt": TEXTS[0]}, [5, 6, 7]]
    path.write_text("\n\n".join(json.dumps(each) for each in rows))
    return path


@pytest.mark.long  # compiles the demo model with KV in FP8
def test_figures_as_json_and_as_a_table(prompts: Path, tmp_path: Path) -> None:
    model = str(quantize(Path(DEMO), tmp_path / "int4", "int4", group=32))
    status, output, errors = quality("--prompts", str(prompts), "--json", model=model)
    assert (status, errors) == (0, "")
    shown = json.loads(output.splitlines()[-1])  # below the log, which a process writes elsewhere
    [row] = shown["comparisons"]
    assert (shown["prompts"], row["what"]) == (4, "KV in fp8")
    assert 0 < row["kl_mean"] <= row["kl_p99"] <= row["kl_max"] < 1
    assert 0.5 < row["top1_agreement"] <= 1
    assert row["worst"]["line"] in (1, 3, 5, 7)
    assert row["kl_mean"] <= row["worst"]["kl_mean"] <= row["kl_max"]
    status, output, _ = quality("--prompts", str(prompts), model=model)
    assert status == 0
    assert f"{row['kl_mean']:.5f}" in output
    assert f"line {row['worst']['line']}, mean KL" in output
    assert row["worst"]["prompt"] in output


def test_prompts_are_read_as_texts_and_as_token_ids(prompts: Path, tmp_path: Path) -> None:
    assert read_prompts(prompts) == [
        Prompt(1, TEXTS[0]),
        Prompt(3, TEXTS[1]),
        Prompt(5, TEXTS[0]),
        Prompt(7, [5, 6, 7]),
    ]
    plain = tmp_path / "prompts.txt"
    plain.write_text("\ufeff one \n\n[1, 2]\n" + "x" * 99 + "\n\x1b[31mred\0")
    found = read_prompts(plain)
    assert [(each.line, each.content) for each in found[:2]] == [(1, "one"), (3, "[1, 2]")]
    assert [each.shown for each in found[2:]] == ["x" * 59 + "…", "[31mred"]
    prompts.write_bytes('"a\u2028b"\r\n\r\n"c"'.encode())
    assert read_prompts(prompts) == [Prompt(1, "a\u2028b"), Prompt(3, "c")]


@in_one_test(
    ("name", "content", "message"),
    [
        ("a.txt", b"", "no prompt, one a line"),
        ("a.txt", b" \n\t\n", "no prompt, one a line"),
        ("a.txt", b"\xff\xfe", "not UTF-8"),
        ("a.txt", b"word " * 20_000, "tokens, the model 8192"),
        ("a.jsonl", b'"one"\n{"prompt": 1}', "line 2: Expected"),
        ("a.jsonl", b"{", "line 1: Input data was truncated"),
        ("a.jsonl", b"[" * 5000, "line 1: "),
        ("a.jsonl", b'{"text": "one"}', "line 1: Object missing required field `prompt`"),
        ("a.jsonl", b"[-1]", "line 1: Expected `int` >= 0"),
        ("a.jsonl", b"[1, 99999]", "line 1: token 99999 is not below"),
        ("a.jsonl", b"[184467440737095516150]", "line 1: "),
        ("a.jsonl", b'"one"\n[]', "line 2 is an empty prompt"),
        ("a.jsonl", b'""', "line 1 is an empty prompt"),
    ],
)
def test_bad_prompts_are_one_line(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    status, output, errors = quality("--prompts", str(tmp_path / name), "--json")
    assert (status, output) == (2, "")
    assert message in errors
    assert errors.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--prompts", "/no/file"), "prompts /no/file: No such file"),
        (("--prompts", "."), "Is a directory"),
        ((), "Missing option '--prompts'"),
        (("--prompts", "README.md", "--kv-dtype", "bf16"), "nothing to compare"),
        (("--prompts", "README.md", "--kv-dtype", "int8"), "'int8' is not one of"),
        (("--prompts", "README.md", "--against", "/no"), "/no does not exist: expected a"),
        (("--prompts", "README.md", "--device", "abacus"), "'abacus' cannot be used"),
    ],
)
def test_bad_options_are_one_line(arguments: tuple[str, ...], message: str) -> None:
    status, _, errors = quality(*arguments)
    assert status == 2
    assert message in errors
    assert errors.count("\n") == 1
