"""The kit's parts that run a model, without a GPU: their cases, figures and rows."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from tokenizers import Tokenizer

from benchmarks.gpu_kit import roofline
from benchmarks.gpu_kit.ceilings import CEILINGS
from benchmarks.gpu_kit.kv_push.cache import PushPlan
from benchmarks.gpu_kit.model_steps import events, loading
from benchmarks.gpu_kit.models import graph_step, handoff, model_8b, modes, park, prefill, serve
from benchmarks.gpu_kit.operands.paged import paged
from benchmarks.gpu_kit.session import Session
from benchmarks.gpu_kit.shapes import CONFIG_8B, EIGHT_B, SMALL
from services.local.plan import MAX_LOCAL_PREFILL_TOKENS, check_options
from shared.config import default_block_size
from shared.engine.executors.cuda import cuda_load
from shared.engine.executors.loading.load_options import LoadOptions
from shared.engine.executors.loading.mode_choice import MeasuredDevice
from shared.numerics import TRITON_KERNELS_VERSION
from tests.benchmarks.gpu_kit.on_cpu import OnCpu, session_in
from tests.shared.engine.executors.cuda.fake_device import load
from tests.support.engine.checkpoints import write_llama
from tests.support.engine.device_forms import use_device_forms

GIB = 1 << 30


def test_roofline_of_8b(tmp_path: Path) -> None:
    """15.0 GB of weights per step, 128 KiB of KV per token, 132 TFLOP for 8,192 prompt tokens."""
    assert roofline.kv_bytes_per_token(CONFIG_8B) == 128 << 10
    assert roofline.weight_bytes(CONFIG_8B) == pytest.approx(16.06e9, rel=0.001)
    step, prompt = (roofline.step_work(CONFIG_8B, [0], [count]) for count in (1, 8192))
    assert step.num_bytes == pytest.approx(15.0e9, rel=0.005)
    assert prompt.num_operations == pytest.approx(132e12, rel=0.06)
    on_h100, on_h200 = (
        roofline.decode_s(
            Session("x", tmp_path / "rows.jsonl", card=f"NVIDIA {card}"), CONFIG_8B, 64, 2048
        )
        for card in ("H100 80GB HBM3", "H200")
    )
    assert (on_h100, on_h200) == pytest.approx((10.73e-3, 7.576e-3), rel=0.001)


def test_counted_bytes_give_the_shares_of_a_copy_that_were_measured() -> None:
    """A worker's decode steps of contexts of 2,048 on an H200: `8b_fast` of 2026-11-27."""
    for batch, measured_s, share in ((1, 4.8091e-3, 0.747), (64, 9.6388e-3, 0.786)):
        work = roofline.step_work(CONFIG_8B, [2047] * batch, [1] * batch)
        rate = work.num_bytes / measured_s
        assert rate / CEILINGS["H200"]["copy_bytes_s"] == pytest.approx(share, abs=0.001)


def test_kernels_are_compiled_for_the_blocks_that_a_device_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both have the size of a worker's, and otherwise equal options."""
    found: dict[str, LoadOptions] = {}

    def note(name: str) -> Callable[..., SimpleNamespace]:
        def load(folder: Path, options: LoadOptions, device: object) -> SimpleNamespace:
            found[name] = msgspec.structs.replace(options, dtype="auto", kv_cache_bytes=None)
            return SimpleNamespace(load_stages={})

        return load

    def load_executor(folder: Path, *, device: str, **options: Any) -> SimpleNamespace:
        return note("device")(folder, LoadOptions(**options), device)

    monkeypatch.setattr(loading, "load_executor", load_executor)
    for mode in ("device", "compile"):
        monkeypatch.setattr(loading.CudaExecutor, "load", note(mode))
        loading.load(Session("8b_exact", tmp_path / "rows.jsonl", mode=mode), tmp_path, "exact")
    assert found["device"] == found["compile"]
    sizes = {found["device"].block_size, EIGHT_B.block_size, SMALL.block_size}
    assert sizes == {default_block_size("cuda")}


def test_tables_have_the_dtype_of_steps_on_a_device(tmp_path: Path) -> None:
    assert paged(session_in(tmp_path), [40, 3]).tables.dtype == torch.int32


def test_largest_batch_has_half_of_the_context_first() -> None:
    halved = [(256, 1024), (256, 2048)]
    assert graph_step.decode_cases(EIGHT_B) == [(1, 2048), (64, 2048), (8, 2048), *halved]


@pytest.mark.parametrize(("free", "tokens"), [(77, 256 * 1024), (138, 256 * 2048), (20, 2048)])
def test_kv_takes_the_largest_case_that_fits(
    free: int, tokens: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free * GIB, 0))
    session = Session("graph_step", tmp_path / "rows.jsonl")
    assert graph_step.kv_room(session, graph_step.decode_cases(EIGHT_B)) == tokens
    reasons = [graph_step.reason_left_out(session, n, tokens) for n in (tokens, tokens + 1)]
    assert reasons == ["", "too few KV blocks"]


class Stages:
    """Stands for the events of a device."""

    def __init__(self, model: object) -> None:
        pass

    def milliseconds(self) -> dict[str, float]:
        return {"forward": 3.0, "head": 2.0, "draw": 1.0}


class Worker:
    """Stands for an executor with 64 blocks of KV. Counts steps."""

    num_blocks = 64
    kv_layout = SimpleNamespace(block_size=16)
    computer = SimpleNamespace(model=None)
    num_steps, depth = 0, 2

    def start(self, step: object) -> Callable[[], Awaitable[None]]:
        return partial(self.run, step)

    async def run(self, step: object) -> None:
        self.num_steps += 1

    async def close(self) -> None:
        pass


def test_worker_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One batch exceeds the KV blocks."""
    shapes = replace(SMALL, batches=(1, 3, 500), prompt=96, chunks=(96, 32))
    monkeypatch.setattr(OnCpu, "shapes", shapes)
    monkeypatch.setattr(events, "StepEvents", Stages)
    session, worker = session_in(tmp_path), Worker()
    asyncio.run(model_8b.Measurement(session, worker, "exact").run())  # type: ignore[arg-type]
    decoded = 2 * (2 * (model_8b.WARM_UP_STEPS + model_8b.STEPS) + 1)  # alone, and in flight
    mixed = 1 + model_8b.WARM_UP_STEPS + model_8b.PROMPTS
    assert worker.num_steps == decoded + mixed + (1 + model_8b.PROMPTS) * (1 + 3)
    measured = [row for row in session.rows if "measured_ms" in row]
    assert [row["case"] for row in measured] == [
        *("decode, batch 1", "decode, batch 3", "32 of a prompt beside 3 decodes"),
        *("prefill of 96 in chunks of 96", "prefill of 96 in chunks of 32"),
    ]
    assert {row["ceiling"] for row in measured} == {"assumed"}
    assert [row["device_ms"] for row in measured] == [6, 6, 6, 6, 18]  # a prompt's: of all chunks
    assert measured[4]["draw_ms"] == 3
    left_out = [(row["context"], row["left_out"]) for row in session.rows if "left_out" in row]
    assert left_out == [(32, "too few KV blocks"), (64, "too few KV blocks")]


@pytest.mark.parametrize("parked", ["host", "device"])
def test_parked_worker_is_measured(
    parked: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On CPU tensors, where what leaves is what gets free. Weights that stay are a failure."""
    use_device_forms(monkeypatch)
    monkeypatch.setattr(cuda_load, "run_largest_step", lambda *_: None)
    monkeypatch.setattr(park._Rounds, "_free_bytes", lambda self: self._executor.offloaded_bytes)
    write_llama(tmp_path, vocab_size=512)
    session = session_in(tmp_path)
    rounds = park._Rounds(session, load(tmp_path, parked_weights=parked)).run()
    if parked == "device":
        with pytest.raises(RuntimeError, match=r"0 bytes are free of .* of weights and KV"):
            asyncio.run(rounds)
        return
    asyncio.run(rounds)
    rows = {row["case"]: row for row in session.rows}
    assert [*rows] == [f"{each} {n}" for n in (1, 2) for each in ("park", "wake", "tokens")]
    assert rows["park 1"]["offloaded_bytes"] > 0 == rows["wake 2"]["offloaded_bytes"]
    assert all(rows[f"tokens {n}"]["is_equal"] for n in (1, 2))


def write_rows(folder: Path, *rows: dict[str, Any]) -> OnCpu:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return replace(session_in(folder), part="modes")


def figure(part: str, case: str, mode: str, milliseconds: float, **columns: Any) -> dict[str, Any]:
    found = {"part": part, "case": case, "mode": mode, "measured_ms": milliseconds}
    return {**found, "is_captured": True, **columns}


BITS = {"part": "bits", "case": "verdict"}
FIGURES = [
    figure("graph_step", f"decode, batch {batch}", mode, milliseconds)
    for batch, took in ((1, (5.5, 5.0)), (3, (13.0, 10.0)))
    for mode, milliseconds in zip(graph_step.MODES, took, strict=True)
] + [
    figure("prefill", "prefill of 48 in chunks of 48", "exact", 360.0),
    figure("prefill", "prefill of 48 in chunks of 48", "fast", 300.0),
]


@pytest.mark.parametrize("is_exact", [True, False])
def test_mode_is_written_from_the_parts_before(is_exact: bool, tmp_path: Path) -> None:
    """The cost is the largest of the three ratios; only the last verdict counts."""
    verdicts = {**BITS, "state": "running"}, {**BITS, "state": "final", "exact": is_exact}
    session = write_rows(tmp_path, *FIGURES, *verdicts)
    modes.run(session)
    row = session.rows[-1]
    fields = {name: row[name] for name in MeasuredDevice.__struct_fields__}
    expected = MeasuredDevice("sm90", TRITON_KERNELS_VERSION, is_exact, 1.3)
    assert (row["case"], msgspec.convert(fields, MeasuredDevice)) == ("mode", expected)


@pytest.mark.parametrize(
    ("rows", "missing"),
    [
        (FIGURES, ["the verdict of the part bits"]),
        ([*FIGURES, {**BITS, "state": "main", "exact": True}], ["the verdict of the part bits"]),
        ([*FIGURES[1:], {**BITS, "state": "final", "exact": True}], ["decode, batch 1, exact"]),
        (
            [
                *FIGURES[:-1],
                figure("prefill", FIGURES[-1]["case"], "fast", 300.0, is_captured=False),
                {**BITS, "state": "final", "exact": True},
            ],
            ["prefill of 48 in chunks of 48, fast"],
        ),
    ],
)
def test_no_mode_is_written_if_something_lacks(
    rows: list[dict[str, Any]],
    missing: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(modes, "_measured", lambda session, missing: {})
    session = write_rows(tmp_path, *rows)
    modes.run(session)
    last = session.rows[-1]
    assert (last["case"], last["missing"]) == ("no mode", missing)


def test_figures_that_lack_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode by the function of `graph_step`, a prompt by that of `prefill`."""

    def measure(session: Session, executor: object, mode: str, *case: int, name: Any) -> None:
        row = figure(session.part, name(session, case), mode, 2.0 if mode == "exact" else 1.0)
        session.add(**{key: value for key, value in row.items() if key != "part"})

    by_batch = partial(measure, name=lambda _, case: graph_step.case_name(case[0]))
    by_chunk = partial(measure, name=lambda session, case: prefill.case_name(session, *case))
    monkeypatch.setattr(graph_step, "measure", by_batch)
    monkeypatch.setattr(prefill, "measure", by_chunk)
    monkeypatch.setattr(graph_step, "fill_kv", lambda *_: None)
    monkeypatch.setattr(
        "benchmarks.gpu_kit.models.dummy_model.make_executor", lambda *_, **__: None
    )
    session = write_rows(tmp_path, *FIGURES[2:4], {**BITS, "state": "final", "exact": True})
    modes.run(session)
    assert session.rows[-1]["cost"] == 2.0
    measured = [row["case"] for row in session.rows if row["part"] == "modes"]
    assert measured == ["decode, batch 1"] * 2 + ["prefill of 48 in chunks of 48"] * 2 + ["mode"]


def test_cluster_serves_tokens_that_are_text(tmp_path: Path) -> None:
    """Llama 3.1 8B but for the vocabulary, which is that of the tokenizer."""
    with serve.model_folder(Session("serve", tmp_path / "rows.jsonl")) as folder:
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        config = json.loads((folder / "config.json").read_text())
    assert config["vocab_size"] == tokenizer.get_vocab_size()
    assert {key for key in CONFIG_8B if CONFIG_8B[key] != config[key]} == {
        *("vocab_size", "eos_token_id")
    }


@pytest.mark.parametrize(("roles", "num_workers"), [("both", 1), ("apart", 2)])
def test_workers_of_a_cluster_fit_one_gpu(roles: str, num_workers: int, tmp_path: Path) -> None:
    """Two workers that each took what is free would not."""
    options = serve.up_options(Session("serve", tmp_path / "rows.jsonl"), roles, tmp_path)
    check_options(options)
    assert options.num_prefill + options.num_decode + options.num_both == num_workers
    assert serve.LOAD.num_input_tokens > MAX_LOCAL_PREFILL_TOKENS, "KV is handed off"


def test_kv_is_pushed_between_processes() -> None:
    """The receiver returns the digest of what it holds."""
    plan = PushPlan(SMALL, num_tokens=100, repetitions=2)
    rows = handoff.measure(plan, "cpu", "cpu")
    assert [row["case"] for row in rows] == ["push of 100 tokens"] * 2
    assert all(row["gb_s"] > 0 for row in rows)
    of_8b = PushPlan(EIGHT_B, num_tokens=1, repetitions=1).layout
    assert of_8b.bytes_per_token == roofline.kv_bytes_per_token(CONFIG_8B)
