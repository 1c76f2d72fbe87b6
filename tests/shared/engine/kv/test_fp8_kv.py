"""A KV cache in FP8: its size, its scales, values beyond its range, and what asks for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from structlog.testing import capture_logs
from torch import Tensor

from shared.engine.executors.group.messages import RankSetup
from shared.engine.executors.group.rank_computer import load_rank
from shared.engine.executors.load import load_executor
from shared.engine.executors.loading.kv_scales import read_kv_scales
from shared.engine.executors.loading.kv_sizing import MemoryReport, num_blocks_in
from shared.engine.executors.loading.load_options import LoadOptions
from shared.engine.executors.loading.model_loading import kv_layout_of
from shared.engine.executors.local_executor import LocalExecutor
from shared.engine.kv.kv_dtype import resolve_kv_dtype
from shared.engine.model_config.model_config import LatentConfig
from shared.engine.models.checkpoint_config import read_config
from shared.engine.parallel.mesh import Mesh
from shared.engine.parallel.mesh_shape import MeshShape
from shared.engine.weights.load import open_checkpoint, report_unused
from shared.errors import CheckpointError, ConfigError
from shared.kv_layout import FP8
from tests.shared.engine.parallel.rank_threads import run_ranks
from tests.support.engine.checkpoints import write_llama
from tests.support.engine.families import FAMILIES
from tests.support.engine.quantized import edit_tensors
from tests.support.engine.steps import Blocks, prefill

CPU = torch.device("cpu")
NUM_LAYERS, NUM_KV_HEADS = 2, 2
PROMPT = [(7 * n) % 190 + 3 for n in range(40)]
ATTENTION = "model.layers.{}.self_attn.{}"
Edit = Callable[[dict[str, Tensor]], Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    write_llama(folder, hidden_size=64, head_dim=32, num_attention_heads=4, intermediate_size=128)
    return folder


@pytest.fixture
def edited(folder: Path, tmp_path: Path) -> Callable[[Edit], Path]:
    """A copy of the checkpoint with other tensors."""

    def edit(change: Edit) -> Path:
        for each in folder.iterdir():
            (tmp_path / each.name).write_bytes(each.read_bytes())
        edit_tensors(tmp_path, change)
        return tmp_path

    return edit


def load(folder: Path, **options: Any) -> LocalExecutor:
    chosen = {"dtype": "bfloat16", "kv_dtype": "fp8", "kv_cache_bytes": 1 << 19, **options}
    return load_executor(folder, num_threads=1, **chosen)


def logits_of(executor: LocalExecutor) -> Tensor:
    return prefill(executor, Blocks(executor.num_blocks).line(PROMPT), 64)


def scaled(layer: int, **values: Any) -> dict[str, Tensor]:
    """`k_scale=…`: tensors of a layer's attention."""
    names = {name.replace("__", "."): torch.tensor(value) for name, value in values.items()}
    return {ATTENTION.format(layer, name): value for name, value in names.items()}


def test_equal_memory_holds_twice_the_tokens_of_bf16(folder: Path) -> None:
    config = read_config(folder)
    layouts = [kv_layout_of(config, dtype, 16) for dtype in (FP8, "bfloat16")]
    memory = MemoryReport(free=1 << 27, total=1 << 28)
    fp8, bf16 = (num_blocks_in(memory, each) * each.block_size for each in layouts)
    assert fp8 >= 1.98 * bf16
    executors = [load(folder), load(folder, kv_dtype="bf16")]
    assert executors[0].num_blocks >= 1.98 * executors[1].num_blocks
    for executor in executors:
        held = executor.computer.kv_cache.numel() * executor.computer.kv_cache.element_size()
        assert held <= 1 << 19


def test_workers_of_unlike_caches_share_no_kv(folder: Path) -> None:
    fp8, plain, named = load(folder), load(folder, kv_dtype="auto"), load(folder, kv_dtype="bf16")
    assert fp8.numerics.kv_dtype == FP8
    assert fp8.revision == plain.revision == named.revision
    assert plain.numerics == named.numerics
    assert plain.kv_layout == named.kv_layout
    assert not fp8.numerics.may_share_kv(plain.numerics)
    assert fp8.kv_layout.key != plain.kv_layout.key
    assert not torch.equal(logits_of(fp8), logits_of(plain))
    near = torch.nn.functional.cosine_similarity(logits_of(fp8), logits_of(plain))
    assert near.min() > 0.9


@pytest.mark.parametrize(
    ("names", "heads"),
    [
        (("k_scale", "v_scale"), 1),
        (("k_scale", "v_scale"), NUM_KV_HEADS),
        (("attn.k_scale", "attn.v_scale"), 1),
        (("k_proj.k_scale", "v_proj.v_scale"), 1),
        (("qkv_proj.k_scale", "qkv_proj.v_scale"), 1),
        (("k_proj.output_scale", "v_proj.output_scale"), 1),
    ],
)
@pytest.mark.parametrize(
    ("dtype", "shape"),
    [(torch.float32, (-1,)), (torch.bfloat16, (-1, 1, 1)), (torch.float16, (1, -1))],
)
def test_scales_are_read_by_every_name(
    edited: Callable[[Edit], Path],
    names: tuple[str, str],
    heads: int,
    dtype: torch.dtype,
    shape: tuple[int, ...],
) -> None:
    values = torch.tensor([[0.5, 0.75], [2.0, 3.0]])[:, :heads].to(dtype)
    stored = [each.reshape(shape).clone() for each in values]
    tensors = dict(zip((ATTENTION.format(1, name) for name in names), stored, strict=True))
    path = edited(lambda given: given.update(tensors))
    with open_checkpoint(path) as source:
        found = read_kv_scales(source, read_config(path))
    assert found[0].eq(1).all()
    assert found[1].equal(values.float().expand(2, NUM_KV_HEADS))


def test_one_scale_may_serve_keys_and_values(edited: Callable[[Edit], Path]) -> None:
    path = edited(lambda given: given.update(scaled(0, kv_scale=0.5)))
    with open_checkpoint(path) as source:
        assert read_kv_scales(source, read_config(path))[:, :, 0].tolist() == [
            [0.5, 0.5],
            [1.0, 1.0],
        ]


def test_latents_have_the_scale_of_keys(tmp_path: Path) -> None:
    """As values are parts of keys, another scale of values is not used, and named."""
    FAMILIES["deepseek"].write(tmp_path)
    config = read_config(tmp_path)
    tensors = scaled(0, k_scale=0.5, v_scale=0.25) | scaled(1, kv_scale=2.0)
    edit_tensors(tmp_path, lambda given: given.update(tensors))
    with capture_logs() as logs, open_checkpoint(tmp_path) as source:
        found = read_kv_scales(source, config)
    assert found[:, :, 0].tolist() == [[0.5, 0.5], [2.0, 2.0], *[[1.0, 1.0]] * (len(found) - 2)]
    unused = [each for each in logs if each["event"] == "kv_scales_not_used"]
    assert [(each["count"], each["of"]) for each in unused] == [(1, "values")]
    executors = [load(tmp_path, kv_dtype=each) for each in ("fp8", "bf16")]
    assert [each.numerics.kv_dtype for each in executors] == [FP8, ""]
    assert executors[0].num_blocks == 2 * executors[1].num_blocks
    fp8, plain = map(logits_of, executors)
    assert not torch.equal(fp8, plain)
    assert torch.nn.functional.cosine_similarity(fp8, plain).min() > 0.9


@pytest.mark.parametrize(
    ("names", "is_declared", "warnings"),
    [
        ((), False, []),
        ((), True, ["kv_scales_missing"]),
        (("k_scale",), False, ["kv_scales_missing"]),
        (("attn.impl.k_scale",), True, ["kv_scales_missing", "tensors_not_used"]),
        (("attn.impl.k_scale",), False, ["tensors_not_used"]),
    ],
)
def test_scales_that_are_not_found_are_logged(
    edited: Callable[[Edit], Path], names: Sequence[str], is_declared: bool, warnings: list[str]
) -> None:
    """Others than those of the names above, where an FP8 cache needs them."""
    tensors = {ATTENTION.format(0, name): torch.tensor(2.0) for name in names}
    path = edited(lambda given: given.update(tensors))
    config = msgspec.structs.replace(read_config(path), declares_fp8_kv=is_declared)
    with capture_logs() as logs, open_checkpoint(path) as source:
        read_kv_scales(source, config)
        report_unused(tensors)
    assert [each["event"] for each in logs if each["log_level"] == "warning"] == warnings


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (scaled(0, k_scale=0.0), r"layers\.0\.self_attn\.k_scale is \[0\.0\]: scales of KV are"),
        (scaled(0, k_scale=-1.0), "scales of KV are between 6.0e-08 and 6.6e\\+04"),
        (scaled(1, v_scale=float("nan")), r"is \[nan\]: scales of KV are between"),
        (scaled(1, v_scale=float("inf")), r"is \[inf\]: scales of KV are between"),
        (scaled(1, v_scale=1e30), "scales of KV are between"),
        (scaled(1, k_scale=[0.5, 1e-40]), "scales of KV are between"),
        (scaled(1, v_scale=[1.0, 2.0, 3.0]), r"has shape \[3\]: it is neither one scale nor one"),
        (scaled(1, v_scale=[]), r"has shape \[0\]: it is neither one scale nor one"),
        (scaled(1, v_scale=2), "is I64; scales are F32, BF16, F16"),
        (scaled(0, k_scale=1.0, kv_scale=1.0), "are both a scale of KV"),
    ],
)
def test_bad_scales_are_named(
    edited: Callable[[Edit], Path], tensors: dict[str, Tensor], message: str
) -> None:
    path = edited(lambda given: given.update(tensors))
    with pytest.raises(CheckpointError, match=message):
        load(path)
    load(path, kv_dtype="bf16")


def test_scale_with_the_shape_of_another_tensor_takes_no_memory(folder: Path) -> None:
    """Of more bytes than any address space has."""
    name = ATTENTION.format(0, "k_scale")
    source: Any = SimpleNamespace(
        names=lambda: [name], info=lambda _: ("F32", (1 << 40, 1 << 20)), path=lambda _: "file"
    )
    with pytest.raises(CheckpointError, match="it is neither one scale nor one for each of 2 KV"):
        read_kv_scales(source, read_config(folder))


def test_scales_are_part_of_the_revision_and_of_the_bits(edited: Callable[[Edit], Path]) -> None:
    path = edited(lambda given: None)
    plain = load(path)
    edit_tensors(path, lambda given: given.update(scaled(0, k_scale=0.3, v_scale=0.7)))
    with_scales = load(path)
    assert plain.revision != with_scales.revision
    assert not torch.equal(logits_of(plain), logits_of(with_scales))


def test_a_scale_lets_a_cache_hold_large_values_and_others_saturate(
    edited: Callable[[Edit], Path],
) -> None:
    """Values 2,000 times as large as usual, divided out again after attention."""

    def enlarge(tensors: dict[str, Tensor]) -> None:
        for layer in range(NUM_LAYERS):
            tensors[ATTENTION.format(layer, "v_proj.weight")] *= 2048
            tensors[ATTENTION.format(layer, "o_proj.weight")] /= 2048

    path = edited(enlarge)
    expected, saturated = (logits_of(load(path, kv_dtype=each)) for each in ("bf16", "fp8"))
    edit_tensors(path, lambda given: [given.update(scaled(n, v_scale=64.0)) for n in (0, 1)])
    fitting = logits_of(load(path))
    assert saturated.isfinite().all()
    errors = [(each - expected).abs().mean() for each in (fitting, saturated)]
    assert errors[0] < 0.2 * errors[1]


@pytest.mark.parametrize("kv_dtype", ["bf16", "fp8"])
def test_keys_that_are_no_numbers_stay_visible(
    edited: Callable[[Edit], Path], kv_dtype: str
) -> None:
    def spoil(tensors: dict[str, Tensor]) -> None:
        tensors[ATTENTION.format(1, "k_proj.weight")][0, 0] = torch.nan

    assert logits_of(load(edited(spoil), kv_dtype=kv_dtype)).isnan().all()


def test_ranks_take_the_scales_of_their_heads(edited: Callable[[Edit], Path]) -> None:
    path = edited(
        lambda given: given.update(
            scaled(0, k_scale=[0.5, 0.25], v_scale=0.7) | scaled(1, k_scale=0.3, v_scale=[0.9, 2.0])
        )
    )
    executor = load(path)
    expected = logits_of(executor)
    setup = RankSetup(
        model_dir=str(path),
        options=LoadOptions(dtype="bfloat16", kv_dtype="fp8"),
        max_blocks=16,
        num_threads=1,
        kv=(),
        masks=-1,
    )

    def logits(mesh: Mesh) -> tuple[Tensor, str]:
        loaded = load_rank(setup, mesh)
        loaded.computer.num_blocks = 16  # type: ignore[attr-defined]
        line = Blocks(16).line(PROMPT)
        return prefill(loaded.computer, line, 64), loaded.identity.numerics  # type: ignore[arg-type]

    for found, numerics in run_ranks(MeshShape(2), logits):
        assert torch.equal(found, expected)
        assert numerics == str(executor.numerics)


def test_auto_follows_the_checkpoint_and_bf16_and_fp8_need_what_they_need(folder: Path) -> None:
    config = read_config(folder)
    declared = msgspec.structs.replace(config, declares_fp8_kv=True)
    latent = LatentConfig(kv_rank=8, nope_dim=8, rope_dim=8, value_dim=8)
    latents = msgspec.structs.replace(declared, latent=latent)
    resolved = [
        resolve_kv_dtype("auto", "float32", each, CPU) for each in (config, declared, latents)
    ]
    assert resolved == ["float32", FP8, FP8]
    assert resolve_kv_dtype("bf16", "bfloat16", declared, CPU) == "bfloat16"
    for given, each, message in [
        ("bf16", config, "kv_dtype bf16 needs activations in bfloat16, not float32"),
        ("int8", config, "kv_dtype 'int8' is none of auto, bf16, fp8"),
    ]:
        with pytest.raises(ConfigError, match=message):
            resolve_kv_dtype(given, "float32", each, CPU)
