"""When cuDNN computes the attention of prompts, and what it is given."""

from __future__ import annotations

import sys
from copy import deepcopy
from functools import partial
from pathlib import Path

import pytest
import torch
from structlog.testing import capture_logs

from kernels.reference.prefill_attention import prefill_attention
from shared.engine.executors.cuda.cuda_executor import CudaExecutor
from shared.engine.layers.attention_backends import choice
from shared.engine.layers.attention_backends.choice import (
    AttentionState,
    CudnnFacts,
    choose_library,
    probe,
    reason_against_cudnn,
)
from shared.engine.layers.attention_backends.cudnn import CudnnPrefill
from shared.engine.layers.attention_inputs import PrefillRows
from shared.errors import ConfigError
from tests.shared.engine.executors.cuda.fake_device import FakeDriver, load
from tests.shared.engine.layers.attention_backends.fake_cudnn import FakeCudnn
from tests.support.engine.checkpoints import write_llama
from tests.support.engine.steps import Blocks, prefill
from tests.support.grids import in_one_test

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
CPU = torch.device("cpu")
STATE = AttentionState(8, 2, 128, 64, BF16, BF16, 0.1, False, False, False, False)
FACTS = CudnnFacts("1.22.1", 91900, 90)
OF_STATE = {
    "latents": {"is_latent": True},
    "windows and chunks": {"has_reach": True},
    "softcap": {"has_softcap": True},
    "sinks": {"has_sinks": True},
    "KV in FP8": {"kv_dtype": FP8},
    "no torch.float32": {"dtype": torch.float32, "kv_dtype": torch.float32},
    "heads of 100 are no multiple of 8": {"head_dim": 100},
    "heads of 512 exceed 256": {"head_dim": 512},
    "": {"head_dim": 256, "block_size": 16, "dtype": torch.float16, "kv_dtype": torch.float16},
}
OF_FACTS = {
    "compute capability 9.0": {"capability": 80},
    "is not installed: pip install '.[cuda]' in the clone": {"frontend": ""},
    "1.13.0 is not 1.14 to 1.22": {"frontend": "1.13.0"},
    "1.23.0 is not 1.14 to 1.22": {"frontend": "1.23.0"},
    "cuDNN 91001 is older": {"cudnn": 91001},
    "": {"frontend": "1.14.0", "cudnn": 91002, "capability": 100},
}


@in_one_test(("reason", "fields"), OF_STATE.items())
def test_layers_that_cudnn_cannot_serve(reason: str, fields: dict[str, object]) -> None:
    found = reason_against_cudnn(STATE._replace(**fields), "fast", FACTS)
    assert reason in found
    assert bool(reason) == bool(found)


@in_one_test(("reason", "fields"), OF_FACTS.items())
def test_machines_that_cannot_serve_cudnn(reason: str, fields: dict[str, object]) -> None:
    found = reason_against_cudnn(STATE, "fast", FACTS._replace(**fields))
    assert reason in found
    assert bool(reason) == bool(found)


def test_exact_mode_is_refused_first() -> None:
    assert "exact mode" in reason_against_cudnn(STATE._replace(is_latent=True), "exact", FACTS)


def rows_of(query_lens: list[int], lens: list[int], block_size: int) -> PrefillRows:
    """Sequences whose blocks are in no order, and shared by none."""
    width = -(-max(lens) // block_size)
    generator = torch.Generator().manual_seed(1)
    blocks = torch.randperm(width * len(lens), generator=generator).to(torch.int32)
    starts = torch.tensor([0, *query_lens]).cumsum(0)
    return PrefillRows(blocks.view(len(lens), width), starts, torch.tensor(lens), lower=None)


BATCHES = [
    ([40], [40]),
    ([2, 65, 3], [2, 130, 70]),
    ([5, 7], [5, 500]),
]


@in_one_test(("batch", "block_size"), [(batch, size) for batch in BATCHES for size in (16, 64)])
def test_cudnn_is_given_what_the_reference_attends_to(
    batch: tuple[list[int], list[int]], block_size: int
) -> None:
    rows = rows_of(*batch, block_size)
    torch.manual_seed(0)
    num_blocks = rows.block_tables.numel()
    query = torch.randn(sum(batch[0]), 4, 24, dtype=BF16)
    cache = torch.randn(2, num_blocks, 2, block_size, 24, dtype=BF16)
    library = CudnnPrefill(FakeCudnn(), 0.2)
    found = library.attend(query, cache, rows)
    assert library.failure == ""
    tables = rows.block_tables, rows.cu_seqlens_q, rows.context_lens
    wanted = prefill_attention(query, cache, *tables, 0.2)
    torch.testing.assert_close(found, wanted, atol=0.02, rtol=0.02)


def test_steps_of_like_sizes_share_a_graph() -> None:
    cudnn = FakeCudnn()
    library = CudnnPrefill(cudnn, 0.2)
    assert deepcopy(library) is library  # of a model whose kernels are compiled
    cache = torch.zeros(2, 64, 2, 16, 24, dtype=BF16)
    for query_lens, lens in (([40], [40]), ([50], [200]), ([2], [9]), ([3, 3], [3, 90])):
        rows = rows_of(query_lens, lens, 16)
        query = torch.zeros(sum(query_lens), 4, 24, dtype=BF16)
        assert library.attend(query, cache, rows) is not None
    assert cudnn.num_built == 2  # of one sequence, of two


def test_library_that_fails_is_not_asked_again() -> None:
    cudnn = FakeCudnn()
    cudnn.error = RuntimeError("no engine configs\nof many lines")
    library, rows = CudnnPrefill(cudnn, 0.2), rows_of([4], [4], 16)
    query, cache = torch.zeros(4, 4, 24, dtype=BF16), torch.zeros(2, 1, 2, 16, 24, dtype=BF16)
    with capture_logs() as logs:
        assert [library.attend(query, cache, rows) for _ in range(2)] == [None, None]
    assert cudnn.num_built == 1
    assert [each["reason"] for each in logs] == ["RuntimeError: no engine configs"]


SMALL = STATE._replace(head_dim=24, num_heads=4, block_size=16)


def test_probe_compares_with_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "prefill_attention", prefill_attention)
    library = CudnnPrefill(FakeCudnn(), SMALL.scale)
    assert probe(library, SMALL, CPU) == ""
    assert "largest error" in probe(library, SMALL._replace(scale=1.0), CPU)


def test_choice_is_logged_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "prefill_attention", prefill_attention)
    monkeypatch.setitem(sys.modules, "cudnn", FakeCudnn())
    with capture_logs() as logs:
        found = [
            choose_library(asked, SMALL, mode, CPU, partial(FACTS._replace, **fields))
            for asked, mode, fields in (
                ("auto", "fast", {}),
                ("cudnn", "exact", {}),
                ("cudnn", "fast", {"frontend": ""}),
                ("cudnn", "fast", {}),
            )
        ]
    assert [each is not None for each in found] == [False, False, False, True]
    assert [each["backend"] for each in logs] == ["triton", "triton", "triton", "cudnn"]
    assert "not installed" in logs[2]["reason"]


def test_worker_computes_prompts_with_cudnn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until it fails: then the kernels of this project do."""
    write_llama(tmp_path, head_dim=16, num_hidden_layers=1)
    monkeypatch.setattr(CudnnFacts, "found", lambda capability: FACTS)
    cudnn = FakeCudnn()
    monkeypatch.setitem(sys.modules, "cudnn", cudnn)
    given = {"dtype": "bfloat16", "mode": "fast", "kv_cache_bytes": 1 << 20}
    ours, theirs = (load(tmp_path, **given, attention=attention) for attention in ("auto", "cudnn"))
    assert [each.step_launch for each in (ours, theirs)] == ["plain", "plain, cudnn"]
    built = cudnn.num_built
    logits = [_logits(each) for each in (ours, theirs)]
    torch.testing.assert_close(logits[0], logits[1], atol=0.2, rtol=0.05)
    assert cudnn.num_built == built + 1
    theirs.computer.model.layers[0].self_attn.library.failure = "it is lost"
    assert torch.equal(_logits(theirs), logits[0])
    assert theirs.step_launch == "plain"


def test_device_that_a_probe_breaks_ends_the_start_with_the_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel's error arrives after its launch, and stays: every later launch raises it."""
    write_llama(tmp_path, head_dim=16, num_hidden_layers=1)
    monkeypatch.setattr(CudnnFacts, "found", lambda capability: FACTS)
    cudnn, driver = FakeCudnn(), FakeDriver()
    cudnn.error = RuntimeError("misaligned address")
    monkeypatch.setitem(sys.modules, "cudnn", cudnn)
    given = {"dtype": "bfloat16", "mode": "fast", "kv_cache_bytes": 1 << 20}
    assert load(tmp_path, **given, attention="cudnn").step_launch == "plain"  # the device is well

    def fail() -> None:
        if cudnn.num_built:
            raise RuntimeError("CUDA error: misaligned address\nof many lines")

    cudnn.num_built, driver.synchronize = 0, fail  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match=r"of attention 'cudnn': CUDA error: misaligned address;"):
        load(tmp_path, driver=driver, **given, attention="cudnn")


def _logits(executor: CudaExecutor) -> torch.Tensor:
    line = Blocks(executor.num_blocks).line(list(range(5, 45)))
    return prefill(executor, line, 40)
