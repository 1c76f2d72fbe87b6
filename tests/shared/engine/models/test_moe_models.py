"""Models with experts: each peculiarity counts, no token changes another, bad weights are told."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
import structlog
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from kernels.cpu.gemm.bf16_gemm import has_bf16_kernels
from shared.engine.executors.load import load_executor
from shared.engine.executors.local_executor import LocalExecutor
from shared.engine.layers.moe import Experts, MoeMlp
from shared.engine.model_config.moe_config import MoeConfig, Routing
from shared.engine.models import checkpoint_config
from shared.errors import CheckpointError
from tests.support.engine.families import FAMILIES
from tests.support.engine.steps import Blocks, advance, prefill, step_of

PROMPT = torch.randint(3, 199, (40,), generator=torch.Generator().manual_seed(2)).tolist()
# Sizes of full blocks of 32, which compressed weights need.
WHOLE = {"hidden_size": 96, "moe_intermediate_size": 64, "intermediate_size": 96, "head_dim": 32}
Checkpoint = Callable[..., tuple[Path, PreTrainedModel]]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    @cache
    def write(family: str, dtype: str = "float32", *, is_whole: bool = False) -> Any:
        folder = tmp_path_factory.mktemp("model")
        options = WHOLE if is_whole else {}
        return folder, FAMILIES[family].write(folder, dtype=getattr(torch, dtype), **options)

    return write


def load(folder: Path, dtype: str = "float32", **options: Any) -> LocalExecutor:
    return load_executor(folder, dtype=dtype, kv_cache_bytes=1 << 20, **options)


def logits(executor: LocalExecutor, prompt: list[int] = PROMPT, chunk: int = 64) -> torch.Tensor:
    return prefill(executor, Blocks(executor.num_blocks).line(prompt), chunk)


def replaced(config: MoeConfig, **changes: Any) -> MoeConfig:
    routing = {key: value for key, value in changes.items() if key in Routing.__struct_fields__}
    others = {key: value for key, value in changes.items() if key not in routing}
    changed = msgspec.structs.replace(config.routing, **routing)
    return msgspec.structs.replace(config, routing=changed, **others)


MUTATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "renormalised, mixtral": ("mixtral", {"is_renormalised": False}),
    "renormalised, qwen3": ("qwen3 moe", {"is_renormalised": False}),
    "not renormalised": (
        "glm4 moe, norms, biases, plain weights",
        {"is_renormalised": True},
    ),
    "scale": ("glm4 moe", {"scale": 1.0}),
    "groups": ("glm4 moe", {"num_groups": 1, "top_groups": 1}),
    "score": ("mixtral", {"score": "sigmoid"}),
    "number of experts": ("qwen3 moe", {"experts_per_token": 4}),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_routing_without_a_peculiarity_differs(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    family, changes = MUTATIONS[name]
    folder, _ = checkpoint(family)
    expected = logits(load(folder))
    read = checkpoint_config.read_config

    def mutated(path: Path) -> Any:
        config = read(path)
        layers = [
            layer
            if layer.moe is None
            else msgspec.structs.replace(layer, moe=replaced(layer.moe, **changes))
            for layer in config.layers
        ]
        return msgspec.structs.replace(config, layers=tuple(layers))

    monkeypatch.setattr("shared.engine.executors.cpu_executor.read_config", mutated)
    assert relative_error(logits(load(folder)), expected) > 1e-3


@pytest.mark.parametrize("part", ["bias", "shared"])
def test_model_without_a_part_differs(checkpoint: Checkpoint, part: str) -> None:
    executor = load(checkpoint("glm4 moe")[0])
    expected = logits(executor)
    for module in executor.computer.model.modules():
        if isinstance(module, MoeMlp):
            if part == "bias":
                module.gate.bias = None
            else:
                module.shared_experts = None
    assert relative_error(logits(executor), expected) > 1e-3


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).pow(2).mean().sqrt() / expected.pow(2).mean().sqrt())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("is_skewed", [False, True], ids=["spread", "one expert"])
def test_no_bit_depends_on_other_sequences(
    checkpoint: Checkpoint, dtype: str, is_skewed: bool
) -> None:
    """Alone and among 32 others; also if all tokens choose the same experts, and others none."""
    executor = load(checkpoint("glm4 moe", "bfloat16")[0], dtype)
    if is_skewed:
        for module in executor.computer.model.modules():
            if isinstance(module, MoeMlp):
                assert module.gate.bias is not None
                bias = torch.zeros(8)
                bias[[3, 6]] = 9.0
                module.gate.bias.data = bias
    alone = logits(executor)
    blocks = Blocks(executor.num_blocks)
    lines = [blocks.line(PROMPT), *(blocks.line(PROMPT[n % 7 :]) for n in range(32))]
    together = advance(executor, [(line, len(line.token_ids)) for line in lines])
    assert torch.equal(together[: len(PROMPT)], alone)
    assert torch.equal(logits(executor, chunk=1), alone)


def test_equal_experts_are_chosen_by_id(checkpoint: Checkpoint) -> None:
    executor = load(checkpoint("qwen3 moe")[0])
    module = next(each for each in executor.computer.model.modules() if isinstance(each, MoeMlp))
    weight = torch.zeros(module.gate.parameter.shape)
    module.gate.replace_weight(weight)
    choice = module.gate(torch.randn(3, 64))
    assert choice.ids.tolist() == [[0, 1, 2, 3, 4]] * 3


@pytest.mark.skipif(not has_bf16_kernels(), reason="the library multiplies expert by expert")
def test_python_calls_do_not_grow_with_experts(tmp_path: Path) -> None:
    counts = []
    for num_experts in (6, 8, 64):  # the first fills caches, whose keys are then compared
        folder = tmp_path / str(num_experts)
        FAMILIES["qwen3 moe"].write(folder, num_experts=num_experts, dtype=torch.bfloat16)
        executor = load(folder, "bfloat16")
        logits(executor)
        counts.append(calls(lambda executor=executor: logits(executor)))  # type: ignore[misc]
    assert counts[1] == counts[2]


def calls(function: Callable[[], object]) -> int:
    count = 0

    def profile(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("family", ["qwen3 moe", "glm4 moe"])
def test_compressed_experts_have_the_same_bits(
    checkpoint: Checkpoint, family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packed in the shared file, and compressed in it; loaded again from both."""
    monkeypatch.setenv("HEARTH_CACHE_DIR", str(tmp_path))
    folder, _ = checkpoint(family, "bfloat16", is_whole=True)
    dense = load(folder, "bfloat16")
    expected = logits(dense)
    for _ in range(2):
        compressed = load(folder, "bfloat16", weights="compressed")
        assert torch.equal(logits(compressed), expected)
        assert torch.equal(logits(load(folder, "bfloat16")), expected)
    experts = sum(
        each.gate_up_proj.weight.numel() + each.down_proj.weight.numel()
        for each in compressed.computer.model.modules()
        if isinstance(each, Experts)
    )
    assert compressed.weights.num_compressed >= experts > 0 or not has_bf16_kernels()
    assert len(list((tmp_path / "weights").glob("*.packed"))) == 2


def test_dummy_weights_need_no_checkpoint(checkpoint: Checkpoint, tmp_path: Path) -> None:
    config = (checkpoint("glm4 moe")[0] / "config.json").read_bytes()
    (tmp_path / "config.json").write_bytes(config)
    executor = load(tmp_path, load_format="dummy")
    assert logits(executor).isfinite().all()
    gate = next(each.gate for each in executor.computer.model.modules() if isinstance(each, MoeMlp))
    assert gate.bias is not None
    assert not gate.bias.any()


def test_missing_expert_tensor_is_named(checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder = checkpoint("mixtral")[0]
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if "layers.1.block_sparse_moe.experts.2.w" in name]:
        del tensors[name]
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path)
    assert caught.value.message.endswith(
        "tensor model.layers.1.mlp.experts.2.down_proj.weight is missing, and 2 more"
    )


def test_prediction_layers_of_a_checkpoint_are_not_read(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    folder = checkpoint("glm4 moe")[0]
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.3.eh_proj.weight"] = torch.zeros(2, 2)
    save_file(tensors, tmp_path / "model.safetensors")
    given = msgspec.json.decode((folder / "config.json").read_bytes())
    given.pop("num_mtp_layers", None)
    config = tmp_path / "config.json"
    config.write_bytes(msgspec.json.encode({**given, "num_nextn_predict_layers": 1}))
    assert torch.equal(logits(load(tmp_path)), logits(load(folder)))
    config.write_bytes(msgspec.json.encode({**given, "num_nextn_predict_layers": 0}))
    with structlog.testing.capture_logs() as logged:
        load(tmp_path)
    assert [line["first"] for line in logged if line["log_level"] == "warning"] == [
        ["model.layers.3.eh_proj.weight"]
    ]


def test_router_without_numbers_fails_its_request_alone(checkpoint: Checkpoint) -> None:
    """A token's embedding is NaN. Steps without it give what they gave before."""
    executor = load(checkpoint("glm4 moe")[0])
    good = [token for token in PROMPT if token != 7]
    expected = logits(executor, good)
    embedding = executor.computer.model.embed_tokens.parameter
    embedding.data = embedding.clone()  # the file's are read-only
    embedding[7] = torch.nan
    blocks = Blocks(executor.num_blocks)
    layout = executor.kv_layout

    def run(*prompts: list[int]) -> object:
        work = [(blocks.line(prompt), len(prompt)) for prompt in prompts]
        step = step_of(work, layout.block_size, len(layout.groups))
        return asyncio.run(executor.run(step))

    with pytest.raises(FloatingPointError, match="a router's logits are NaN or infinite"):
        run(good, [5, 7, 9])
    run(good)
    assert torch.equal(logits(executor, good), expected)
    step = advance(executor, [(blocks.line(good), len(good)), (blocks.line([5, 7, 9]), 3)])
    assert torch.equal(step[: len(good)], expected)
    assert step[-1].isnan().all()
