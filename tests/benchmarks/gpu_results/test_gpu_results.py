"""Runs of the GPU kit, made up, become committed results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from benchmarks.gpu_results import table
from benchmarks.gpu_results.__main__ import add_run, main
from benchmarks.gpu_results.failures import FILE, Failure, read, write
from benchmarks.gpu_results.runs import NoMeasurement, slug_of, stored_runs, whole_rows
from benchmarks.gpu_results.table import NOTHING
from benchmarks.readme_table import BEGIN, END, GPU
from shared.engine.executors.loading.mode_choice import MeasuredDevice, reason_for_fast
from shared.numerics import TRITON_KERNELS_VERSION

H100 = "NVIDIA H100 80GB HBM3"
COMMIT = "0123456789ab"
Rows = list[dict[str, Any]]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The files of a checkout that are updated."""
    root = tmp_path / "checkout"
    (root / "benchmarks" / "results" / "gpu").mkdir(parents=True)
    readme = f"before\n{BEGIN.format(GPU)}{NOTHING}{END}\nafter\n"
    (root / "benchmarks" / "README.md").write_text(readme)
    modes = root / "shared" / "engine" / "modes.json"
    modes.parent.mkdir(parents=True)
    modes.write_text("[]\n")
    return root


def left_by_kit(
    folder: Path,
    rows: Rows,
    *,
    commit: str = COMMIT,
    card: str = H100,
    date: str = "2026-12-01T09",
    kernels: str = "89b4274e612b1693",
    status: str = "ok",
    seconds: float = 2.0,
) -> Path:
    """A folder that the kit left; rows are complete."""
    folder.mkdir()
    kit = {"part": "kit", "case": "run", "date": f"{date}:00:00+00:00", "commit": commit}
    common = {"card": card, "driver": "580.1"}
    lines = [json.dumps({"part": "tests", **common, **row}) + "\n" for row in (kit, *rows)]
    (folder / "rows.jsonl").write_text("".join(lines))
    ended = {"part": "tests", "reason": "", "seconds": seconds, "answers": "?", "status": status}
    ended["deadline_s"] = 2
    (folder / "summary.json").write_text(json.dumps({"kernels": kernels, "parts": [ended]}))
    return folder


def outcome(test: str, outcome: str, **columns: Any) -> dict[str, Any]:
    return {"case": test, "outcome": outcome, **columns}


def test_rows_are_stored_by_card_date_and_commit(root: Path, tmp_path: Path) -> None:
    folder = left_by_kit(tmp_path / "out", [outcome("a", "passed")])
    printed = add_run(folder, root=root)
    (run,) = stored_runs(root / "benchmarks" / "results" / "gpu")
    assert (run.name, run.card, run.commit) == (
        f"h100-80gb-hbm3/2026-12-01-{COMMIT}",
        "h100-80gb-hbm3",
        COMMIT,
    )
    assert [row["case"] for row in run.rows] == ["run", "a", "ended"]
    assert run.rows[-1]["status"] == "ok"
    assert printed == [f"3 rows are now in benchmarks/results/gpu/{run.name}"]


def test_calls_of_one_commit_are_one_run(root: Path, tmp_path: Path) -> None:
    wrong = outcome("a", "failed", max_error=float("nan"))
    first = left_by_kit(tmp_path / "a", [wrong])
    second = left_by_kit(tmp_path / "b", [outcome("b", "passed")])
    for folder in (first, second, second, first):
        add_run(folder, root=root)
    (run,) = stored_runs(root / "benchmarks" / "results" / "gpu")
    assert [row["case"] for row in run.rows if "outcome" in row] == ["a", "b"]


def test_rows_without_a_summary_are_stored(root: Path, tmp_path: Path) -> None:
    """Those of a kit that was killed; older rows have no digest of kernels."""
    rows = [outcome("a", "passed")]
    folder = left_by_kit(tmp_path / "out", rows, commit=f"{COMMIT}-dirty")
    (folder / "summary.json").unlink()
    add_run(folder, root=root)
    (run,) = stored_runs(root / "benchmarks" / "results" / "gpu")
    assert run.commit == f"{COMMIT}-dirty-unknown"
    assert [row["case"] for row in run.rows] == ["run", "a"]


def test_rows_of_kernels_compiled_there_are_left_out(root: Path, tmp_path: Path) -> None:
    rows = [outcome("a", "passed", dry="compile"), outcome("b", "passed")]
    add_run(left_by_kit(tmp_path / "out", rows), root=root)
    (run,) = stored_runs(root / "benchmarks" / "results" / "gpu")
    assert [row["case"] for row in run.rows] == ["run", "b", "ended"]


def test_checkouts_with_changes_are_told_apart(root: Path, tmp_path: Path) -> None:
    """By the commit and the kernels."""
    for kernels in ("89b4274e612b1693", "eea0cb1976bd730e"):
        rows = [outcome("a", "passed")]
        dirty = left_by_kit(tmp_path / kernels, rows, commit=f"{COMMIT}-dirty", kernels=kernels)
        add_run(dirty, root=root)
    runs = stored_runs(root / "benchmarks" / "results" / "gpu")
    commits = [f"{COMMIT}-dirty-89b4274e", f"{COMMIT}-dirty-eea0cb19"]
    assert [run.commit for run in runs] == commits
    assert [run.name for run in runs] == [f"h100-80gb-hbm3/2026-12-01-{each}" for each in commits]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dry": "dry"}, "1 of 3 rows in .* are of a dry run"),
        ({"card": "NVIDIA H200"}, "of 2 cards, not of one"),
    ],
)
def test_other_rows_are_refused(
    change: dict[str, object], reason: str, root: Path, tmp_path: Path
) -> None:
    """Nothing is written then."""
    rows = [outcome("a", "passed"), outcome("b", "passed") | change]
    with pytest.raises(NoMeasurement, match=reason):
        add_run(left_by_kit(tmp_path / "out", rows), root=root)
    assert list((root / "benchmarks" / "results" / "gpu").iterdir()) == []


def test_unknown_commit_must_be_given(root: Path, tmp_path: Path) -> None:
    folder = left_by_kit(tmp_path / "out", [outcome("a", "passed")], commit="unknown")
    with pytest.raises(NoMeasurement, match="give --commit"):
        add_run(folder, root=root)
    add_run(folder, COMMIT, root=root)
    assert stored_runs(root / "benchmarks" / "results" / "gpu")[0].commit == COMMIT


def test_command_refuses_a_dry_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = left_by_kit(tmp_path / "out", [outcome("a", "passed", dry="dry")])
    assert main([str(folder)]) == 2
    assert "1 of 2 rows" in capsys.readouterr().err


def test_lines_that_a_killed_process_left_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"case": 1}\n{"ca{"case": 2}\n{"case": 3}\n{"case": 4')
    assert whole_rows(path) == [{"case": 1}, {"case": 3}]


def test_failures_are_new_then_still_there_then_fixed(root: Path, tmp_path: Path) -> None:
    path = root / "benchmarks" / "results" / "gpu" / FILE
    failed = outcome("a", "failed", message="1 is not 2\nat line 3", sources="d1")
    check = {"part": "smoke", "case": "linear", "ok": False, "max_error": 0.3}
    raised = {"part": "smoke", "case": "sample", "raised": "OutOfResources: shared memory"}
    printed = add_run(left_by_kit(tmp_path / "1", [failed, check, raised]), root=root)
    assert printed[1:] == [
        "new    a: 1 is not 2",
        "new    smoke: linear: an error of 0.3",
        "new    smoke: sample: OutOfResources: shared memory",
    ]
    first_run = f"h100-80gb-hbm3/2026-12-01-{COMMIT}"
    assert read(path)[0] == Failure("a", first_run, COMMIT, "d1", "unknown")

    later = {"commit": "ba9876543210", "date": "2026-12-02T09"}
    rows = [failed, outcome("b", "passed")]
    printed = add_run(left_by_kit(tmp_path / "2", rows, **later), root=root)
    assert printed[1:] == [f"still  a: since {first_run}, unknown"]

    is_fine = {"part": "smoke", "case": "sample", "ok": True}
    rows = [outcome("a", "passed"), check | {"ok": True}, is_fine]
    printed = add_run(left_by_kit(tmp_path / "3", rows, **later), root=root)
    assert [line.split(":")[0] for line in printed[1:]] == ["fixed  a", *["fixed  smoke"] * 2]
    assert read(path) == []


def test_test_that_passed_and_whose_fixture_failed_has_failed(root: Path, tmp_path: Path) -> None:
    rows = [outcome("a", "passed"), outcome("a", "failed"), outcome("b", "skipped")]
    assert add_run(left_by_kit(tmp_path / "out", rows), root=root)[1:] == ["new    a: "]


@pytest.mark.parametrize("status", ["failed", "timed out"])
def test_part_that_fails_without_a_case_is_a_failure(
    status: str, root: Path, tmp_path: Path
) -> None:
    fine = [{"part": "tests", "case": "x", "ok": True}]
    printed = add_run(left_by_kit(tmp_path / "1", fine, status=status), root=root)
    assert printed[1:] == ["new    tests: ended: "]
    for other, seconds in (("not run", 0.0), ("timed out", 1.0)):  # the call had no time left
        folder = left_by_kit(tmp_path / other, [], status=other, seconds=seconds)
        assert not add_run(folder, root=root)[1:]
    printed = add_run(left_by_kit(tmp_path / "2", fine), root=root)
    assert printed[1].startswith("fixed  tests: ended: ")
    wrong = [{"part": "tests", "case": "x", "ok": False}]
    printed = add_run(left_by_kit(tmp_path / "3", wrong, status=status), root=root)
    assert printed[1:] == ["new    tests: x: an error of None"]


def test_failure_is_expected_on_its_card_alone(root: Path, tmp_path: Path) -> None:
    rows = [outcome("a", "failed")]
    add_run(left_by_kit(tmp_path / "1", rows), root=root)
    printed = add_run(left_by_kit(tmp_path / "2", rows, card="NVIDIA H200"), root=root)
    assert printed[1:] == ["new    a: "]
    assert len(read(root / "benchmarks" / "results" / "gpu" / FILE)) == 2


def test_any_text_is_read_as_it_was_written(tmp_path: Path) -> None:
    failure = Failure('a["é\\n"]', "h200/2026-12-01-1", "1", "", 'a "tile"\n\x01\x7f wrong')
    write(tmp_path / "f.toml", [failure])
    assert read(tmp_path / "f.toml") == [failure]


def test_changed_bits_are_printed(root: Path, tmp_path: Path) -> None:
    """Beside the newest run of another commit and of another card; fast modes may differ."""

    def bits(digest: str, sources: str, fast: str) -> Rows:
        exact = {"case": "linear", "shape": [64, 4096], "digest": digest, "sources": sources}
        return [exact, {"case": "linear", "shape": [1], "digest": fast, "mode": "fast"}]

    h200 = {"card": "NVIDIA H200", "commit": "1111111"}
    add_run(left_by_kit(tmp_path / "1", bits("x", "s", "1"), **h200), root=root)
    for commit, date in (("2222222", "2026-11-30T09"), ("4444444", "2026-11-29T09")):
        old = left_by_kit(tmp_path / commit, bits("z", "old", "2"), commit=commit, date=date)
        add_run(old, root=root)
    new = {"commit": "3333333", "date": "2026-12-02T09"}
    printed = add_run(left_by_kit(tmp_path / "3", bits("y", "s", "3"), **new), root=root)
    assert printed[1:] == [
        "bits   linear [64, 4096]: not those of h100-80gb-hbm3/2026-11-30-2222222, "
        "from other sources",
        "bits   linear [64, 4096]: not those of h200/2026-12-01-1111111, from the same sources",
    ]


def test_measured_mode_decides_auto(root: Path, tmp_path: Path) -> None:
    """A new row of a device replaces the one before."""
    path = root / "shared" / "engine" / "modes.json"
    row = {"part": "modes", "case": "verdict", "device": "sm90", "kernels": TRITON_KERNELS_VERSION}
    row |= {"has_passed_bit_tests": True}
    for cost, name in ((1.9, "1"), (1.1, "2")):
        rows = [row | {"cost": cost}, {"part": "modes", "case": "bits"}]
        add_run(left_by_kit(tmp_path / name, rows, commit=COMMIT[:-1] + name), root=root)
        (found,) = msgspec.json.decode(path.read_bytes(), type=tuple[MeasuredDevice, ...])
        assert (reason_for_fast("sm90", (found,)) is None) == (cost < 1.25)


def test_readme_has_the_newest_row_of_each_case(root: Path, tmp_path: Path) -> None:
    row = {"part": "graph_step", "case": "batch 1|x", "predicted_ms": 4.0}
    row |= {"measured_ms": 5.0, "of_roofline": 0.8, "ceiling": "measured", "mode": "exact"}
    load = {"part": "serve", "case": "both, 1 at a time", "ttft_p50_ms": 40.5}
    for hour, commit, share in (("09", "2222222", 0.5), ("10", "1111111", 0.8)):
        old = [row | {"case": "old", "of_roofline": 0.4}] if hour == "09" else []
        rows = [row | {"of_roofline": share}, *old, load, outcome("a", "passed")]
        folder = left_by_kit(tmp_path / commit, rows, commit=commit, date=f"2026-12-02T{hour}")
        add_run(folder, root=root)
    loads = "| " + " | ".join(table.LOADS) + " |"
    rule = "| " + " | ".join("---" for _ in table.LOADS) + " |"
    expected = f"""before
{BEGIN.format(GPU)}**{H100}** — driver 580.1, 2026-12-02

| part | case | context | mode | measured ms | of the roofline | ceiling | commit |
| --- | --- | --- | --- | --- | --- | --- | --- |
| graph_step | batch 1\\|x |  | exact | 5.0 | 0.8 | measured | 1111111 |
| graph_step | old |  | exact | 5.0 | 0.4 | measured | 2222222 |

{loads}
{rule}
| both, 1 at a time |  |  |  | 40.5 |  |  |  | 1111111 |
{END}
after
"""
    assert (root / "benchmarks" / "README.md").read_text() == expected


def test_front_page_has_the_newest_figures_of_each_case(root: Path, tmp_path: Path) -> None:
    """Of each card, though a run has only some of them."""
    steps = [
        {"part": f"8b_{mode}", "mode": mode, "case": f"decode, batch {batch}", "measured_ms": took}
        for mode, batch, took in (
            *(("fast", 1, 39.18), ("fast", 64, 9.99)),
            *(("exact", 1, 6.03), ("exact", 64, 10.51)),
        )
    ]
    newer = [
        {"part": "8b_fast", "mode": "fast", "case": "decode, batch 1", "measured_ms": 5.22},
        *(
            {
                **{"part": "serve", "case": f"both, {users} at a time", "prompt_tokens": 1006.1},
                **{"ttft_p50_ms": ttft, "tokens_per_s": rate},
            }
            for users, ttft, rate in ((1, 41.4, 158.5), (16, 133.7, 1257.5))
        ),
    ]
    for commit, hour, rows in (("1111111", "09", steps), ("2222222", "10", newer)):
        folder = left_by_kit(tmp_path / commit, rows, commit=commit, date=f"2026-12-02T{hour}")
        add_run(folder, root=root)
    decode, cluster = table.gpu_summary(root / "benchmarks" / "results" / "gpu")
    assert "H100-80GB-HBM3" in decode
    assert "| batch 1 and 64: fast 5.2 and 10.0 ms, exact 6.0 and 10.5 ms |" in decode
    assert "1,006-token prompts" in cluster
    wanted = "alone TTFT 41 ms, 158 tokens/s; 16 clients TTFT 134 ms, 1,258 tokens/s"
    assert f"| {wanted} |" in cluster


def test_cards_have_short_names() -> None:
    names = (H100, "NVIDIA H200", "NVIDIA GeForce RTX 4090")
    assert [slug_of(name) for name in names] == ["h100-80gb-hbm3", "h200", "geforce-rtx-4090"]
