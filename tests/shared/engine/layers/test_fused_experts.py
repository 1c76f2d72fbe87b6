"""Experts that are computed together give the rows of their own methods."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from structlog.testing import capture_logs

from kernels import ops
from kernels.reference.grouped_linear import expert_mlp as reference
from shared.engine.executors.cuda.cuda_device import CudaDevice
from shared.engine.executors.cuda.libraries import set_libraries
from shared.engine.executors.loading.load_options import LoadOptions
from shared.engine.executors.loading.model_loading import kv_layout_of, set_mode
from shared.engine.layers import moe
from shared.engine.layers.methods.expert_method import ExpertsState, reason_against_fusing
from shared.engine.layers.moe import MoeMlp
from shared.engine.models.checkpoint_config import read_config
from shared.engine.models.decoder import Decoder
from tests.shared.engine.executors.cuda.fake_device import INDEX, FakeDriver
from tests.support.engine.families import FAMILIES

DENSE = torch.zeros(2, 2), torch.zeros(2, 2)
FAST = ExpertsState(
    is_batch_invariant=False,
    has_library=True,
    is_whole=True,
    has_bias=False,
    has_clamped_gate=False,
    scales_many_inputs=False,
    weights=DENSE,
)
QUANTIZED = torch.zeros(2, dtype=torch.uint8), torch.zeros(2, 2)


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        (FAST, ""),
        (FAST._replace(weights=(*DENSE, *DENSE)), ""),
        (FAST._replace(is_batch_invariant=True), "must not depend on the other rows"),
        (FAST._replace(has_library=False), "the device has one kind of products"),
        (FAST._replace(is_whole=False), "ranks add their sums"),
        (FAST._replace(has_bias=True), "the shared MLP has biases"),
        (FAST._replace(has_clamped_gate=True), "experts have biases and a clamped gate"),
        (FAST._replace(scales_many_inputs=True), "another for each of its experts"),
        (FAST._replace(weights=QUANTIZED), "weights are not dense"),
        (FAST._replace(weights=(*DENSE, object(), object())), "weights are not dense"),
    ],
)
def test_experts_are_computed_together_where_they_may(state: ExpertsState, reason: str) -> None:
    found = reason_against_fusing(state)
    assert reason in found
    assert bool(found) == bool(reason)


@pytest.mark.parametrize("family", ["qwen3 moe", "deepseek", "llama4, experts"])
def test_rows_are_those_of_the_own_methods(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a shared MLP, with one, and with inputs that the router scales; gates are GELU once.
    Only the fast mode computes them together.
    """
    calls = []

    def noted(*args: object, **options: object) -> object:
        calls.append(options)
        return reference(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(moe, "expert_mlp", noted)
    monkeypatch.setattr(
        ops, "_is_for_library", lambda _, *, is_batch_invariant: not is_batch_invariant
    )
    FAMILIES[family].write(tmp_path)
    config = read_config(tmp_path)
    model = Decoder(config, dtype=torch.float32, num_positions=8)
    mlp = next(each for each in model.modules() if isinstance(each, MoeMlp))
    torch.manual_seed(3)
    for parameter in mlp.parameters():
        parameter.data = torch.randn_like(parameter) * 0.2
    if family == "qwen3 moe":
        mlp.experts.gate = ops.gelu_and_mul
    x = torch.randn(23, config.hidden_size)
    with torch.inference_mode():
        set_mode(model, "exact")
        expected, num_tokens = mlp(x), mlp.summed_offsets[-1].clone()
        assert not calls
        set_mode(model, "fast")
        found = mlp(x)
    assert len(calls) == 1
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert int(mlp.summed_offsets[-1]) == 2 * int(num_tokens) > 0
    assert calls[0]["library_rows"] == ops.NEVER  # type: ignore[index]


def test_library_computes_on_request_where_it_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing else lets it: neither a start without the option, nor the exact mode."""
    monkeypatch.setattr(
        ops, "_is_for_library", lambda _, *, is_batch_invariant: not is_batch_invariant
    )
    FAMILIES["qwen3 moe"].write(tmp_path)
    model = Decoder(read_config(tmp_path), dtype=torch.bfloat16, num_positions=8)
    layout = kv_layout_of(model.config, "bfloat16", 16)
    device = CudaDevice(INDEX, torch.device("cpu"), FakeDriver())
    mlps = [each for each in model.modules() if isinstance(each, MoeMlp)]
    for mode, asked, rows in (
        ("exact", "grouped", ops.NEVER),
        ("fast", "auto", ops.NEVER),
        ("fast", "grouped", moe.LIBRARY_ROWS),
    ):
        set_mode(model, mode)  # type: ignore[arg-type]
        with capture_logs() as logs:
            options = LoadOptions(mode=mode, expert_kernels=asked)  # type: ignore[arg-type]
            set_libraries(model, layout, options, device)
        assert {each.library_rows for each in mlps} == {rows}
        used = [each["used"] for each in logs if each["event"] == "expert_kernels"]
        assert used == ([] if asked == "auto" else ["triton" if rows == ops.NEVER else "grouped"])
