"""Quantized checkpoints give the logits of the dequantized ones, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from shared.engine.executors.group.load_group import load_group
from shared.engine.executors.group.messages import RankSetup
from shared.engine.executors.group.rank_computer import load_rank
from shared.engine.executors.load import load_executor
from shared.engine.executors.loading.load_options import LoadOptions
from shared.engine.executors.local_executor import LocalExecutor
from shared.engine.parallel.mesh import Mesh
from shared.engine.parallel.mesh_shape import MeshShape
from shared.errors import CheckpointError
from tests.shared.engine.parallel.rank_threads import run_ranks
from tests.support.engine.checkpoints import write_model
from tests.support.engine.quantized import FILE, dequantize_folder, quantize
from tests.support.engine.steps import Blocks, advance, prefill, step_of
from tests.support.grids import in_short_run

# Decoded beside the product, in fused layers; and shapes of partial blocks, which are not.
BLOCKS: dict[str, Any] = {
    "architecture": "Qwen3ForCausalLM",
    "hidden_size": 128,
    "intermediate_size": 544,
    "head_dim": 64,
    "num_key_value_heads": 4,
}
PARTIAL: dict[str, Any] = {"architecture": "LlamaForCausalLM", "mlp_bias": True}
EXPERTS: dict[str, Any] = {
    **BLOCKS,
    "architecture": "Qwen3MoeForCausalLM",
    "moe_intermediate_size": 96,
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "norm_topk_prob": True,
}
KINDS: dict[str, tuple[dict[str, Any], str, dict[str, Any]]] = {
    "int4": (BLOCKS, "int4", {}),
    "int4, dense attention": (BLOCKS, "int4", {"ignored": [r"re:.*self_attn.*"]}),
    "int4, zeros, rows": (BLOCKS, "int4", {"group": 0, "is_symmetric": False}),
    "fp8": (BLOCKS, "fp8", {}),
    "int4 experts": (EXPERTS, "int4", {"ignored": [r"re:.*self_attn.*"]}),
    "fp8 experts": (EXPERTS, "fp8", {}),
    "int4 experts, partial blocks": (
        {**EXPERTS, "hidden_size": 48, "moe_intermediate_size": 24, "head_dim": 12},
        "int4",
        {"group": 0, "is_symmetric": False},
    ),
    "int4, partial blocks": (PARTIAL, "int4", {"group": 16, "is_symmetric": False}),
    "fp8, partial blocks": (PARTIAL, "fp8", {}),
}
PROMPT = [(11 * n) % 190 for n in range(45)]


def written(root: Path, name: str) -> Path:
    fields, kind, options = KINDS[name]
    write_model(root / "plain", dtype=torch.bfloat16, **fields)
    return quantize(root / "plain", root / "quantized", kind, **options)  # type: ignore[arg-type]


# Each form of weights once: in fused layers, of experts, and not decoded beside the product. Each
# other kind compiles its own fused layers, for 6 s.
SHORT = ("int4", "fp8 experts", "int4, partial blocks")


@pytest.fixture(scope="module", params=in_short_run(SHORT, KINDS))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("model"), request.param)


def load(folder: Path, dtype: str = "bfloat16", **options: Any) -> LocalExecutor:
    return load_executor(folder, dtype=dtype, kv_cache_bytes=8 << 20, **options)


def logits(executor: LocalExecutor) -> Tensor:
    """Of a prompt in chunks, then of a step of two sequences."""
    blocks = Blocks(64)
    long, short = blocks.line(PROMPT, room=1), blocks.line(PROMPT[:3])
    found = prefill(executor, long, 33)
    long.token_ids.append(7)
    return torch.cat((found, advance(executor, [(long, 1), (short, 3)])))


def test_logits_are_those_of_the_dequantized_checkpoint(folder: Path, tmp_path: Path) -> None:
    dense = dequantize_folder(folder, tmp_path / "dense", torch.bfloat16)
    ours, theirs = load(folder), load(dense)
    assert torch.equal(logits(ours), logits(theirs))
    assert ours.weights.num_quantized > 0 == theirs.weights.num_quantized
    layer = type(ours.computer.model.layers[0])
    assert layer is type(theirs.computer.model.layers[0])


@pytest.mark.parametrize("name", ["int4", "fp8", "int4 experts"])
def test_logits_in_fp32(name: str, tmp_path: Path) -> None:
    folder = written(tmp_path, name)
    dense = dequantize_folder(folder, tmp_path / "dense", torch.float32)
    assert torch.equal(logits(load(folder, "float32")), logits(load(dense, "float32")))


@pytest.mark.parametrize(
    "name", in_short_run(SHORT, ["int4", "fp8", "fp8 experts", "int4 experts"])
)
def test_weights_take_the_bytes_of_the_file(name: str, tmp_path: Path) -> None:
    folder = written(tmp_path, name)
    tensors = load_file(folder / FILE)
    layers = {each.rpartition(".")[0] for each in tensors if each.endswith(("_packed", "_inv"))}
    stored = sum(t.nbytes for each, t in tensors.items() if each.rpartition(".")[0] in layers)
    assert load(folder).weights.num_quantized_bytes <= 1.03 * stored


@pytest.mark.parametrize("name", in_short_run(SHORT, ["int4", "fp8"]))
def test_ranks_have_the_bits_of_the_undivided_model(name: str, tmp_path: Path) -> None:
    fields = {**BLOCKS, "intermediate_size": 2048, "num_attention_heads": 8, "hidden_size": 512}
    fields["num_key_value_heads"] = 8
    write_model(tmp_path / "plain", dtype=torch.bfloat16, **fields)
    folder = quantize(tmp_path / "plain", tmp_path / "quantized", name)  # type: ignore[arg-type]
    executor = load(folder)
    lines = [Blocks(64).line(PROMPT)]
    expected = executor.step_logits(step_of([(lines[0], 45)]))

    def of_rank(mesh: Mesh) -> Tensor:
        return load_rank(setup(folder), mesh).computer.step_logits(step_of([(lines[0], 45)]))

    for tp in (2, 4):
        for found in run_ranks(MeshShape(tp), of_rank):
            assert torch.equal(found, expected), f"tp {tp}"


def test_a_cut_inside_of_a_block_is_an_error(tmp_path: Path) -> None:
    write_model(tmp_path / "plain", dtype=torch.bfloat16, **BLOCKS)
    folder = quantize(tmp_path / "plain", tmp_path / "quantized", "fp8")
    message = r"k_proj\.weight_scale_inv: ranks cut it at row 64, inside of 128 rows"
    with pytest.raises(CheckpointError, match=message):
        load_group(folder, "cpu", MeshShape(4))


def setup(folder: Path) -> RankSetup:
    return RankSetup(
        model_dir=str(folder),
        options=LoadOptions(dtype="bfloat16"),
        max_blocks=64,
        num_threads=1,
        kv=(),
        masks=-1,
    )


def test_dummy_weights_have_the_scale_of_dense_ones(tmp_path: Path) -> None:
    folder = written(tmp_path, "int4, partial blocks")
    executor = load(folder, load_format="dummy")
    layer = executor.computer.model.layers[0]
    dense = layer.mlp.down_proj.weight.dense().float()
    assert 0.8 < float(dense.std()) * dense.shape[1] ** 0.5 < 1.2
    assert torch.equal(logits(executor), logits(load(folder, load_format="dummy")))


def test_a_second_process_maps_the_same_weights(tmp_path: Path) -> None:
    folder = written(tmp_path, "int4")
    first, second = (load(folder) for _ in range(2))
    assert first.revision == second.revision
    assert torch.equal(logits(first), logits(second))


def test_private_weights_are_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = written(tmp_path, "int4")
    expected = logits(load(folder))
    (tmp_path / "file").touch()
    monkeypatch.setenv("HEARTH_CACHE_DIR", str(tmp_path / "file"))
    assert torch.equal(logits(load(folder)), expected)


def test_fused_layers_need_one_format(tmp_path: Path) -> None:
    folder = tmp_path / "quantized"
    write_model(tmp_path / "plain", dtype=torch.bfloat16, **BLOCKS)
    quantize(tmp_path / "plain", folder, "int4", ignored=[r"re:.*k_proj"])
    message = "self_attn.q_proj int4 in groups of 32, symmetric, self_attn.k_proj dense"
    with pytest.raises(CheckpointError, match=message):
        load(folder)
