"""An engine with compressed weights: logits with the bits of dense weights, in less memory."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

import numba
import pytest
import torch
from structlog.testing import capture_logs

from kernels.cpu.gemm import compressed_weight, lane_linear, linear
from kernels.cpu.gemm.compressed_weight import CompressedWeight
from kernels.cpu.gemm.decompress_rows import select_rows
from kernels.cpu.simd.cpu_features import has_amx
from shared.engine.executors.load import load_executor
from shared.engine.executors.loading.model_loading import empty_model
from shared.engine.executors.local_executor import LocalExecutor
from shared.engine.models.checkpoint_config import read_config
from shared.engine.weights.load import open_checkpoint
from shared.engine.weights.shared_weights import compress_weights
from shared.engine.weights.weight_form import uses_compressed
from shared.engine.weights.weight_source import read_tensor
from shared.errors import ConfigError
from tests.support.engine.checkpoints import write_llama, write_model
from tests.support.engine.families import FAMILIES
from tests.support.engine.steps import Blocks, advance, prefill
from tests.support.grids import in_short_run

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[4]
PROMPT = [5 + 7 * index % 180 for index in range(90)]
WIDE = {"hidden_size": 96, "intermediate_size": 160, "vocab_size": 224, "head_dim": 32}
# hidden size, inner size and vocabulary are not multiples of the block sizes
ODD = {"hidden_size": 120, "intermediate_size": 250, "vocab_size": 199, "head_dim": 40}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama, yarn", {}),
    "llama, tied": ("llama, yarn", {"tie_word_embeddings": True, "attention_bias": True}),
    "mistral": ("mistral", {}),
    "qwen2, biases": ("qwen2", {}),
    "qwen3": ("qwen3, biases, listed layers", {}),
    "gemma2, tied": ("gemma2, no caps, biases, tied", {}),
    "gemma3, scaled": ("gemma3", {}),
    "phi3, fused": ("phi3", {}),
}
SHORT = (("llama, tied", "odd shapes"), ("phi3, fused", "odd shapes"), ("llama", "full tiles"))
SHAPES = {"odd shapes": ODD, "full tiles": WIDE}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HEARTH_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "weights"


def load(checkpoint: Path, weights: str, dtype: str = "bfloat16") -> LocalExecutor:
    return load_executor(checkpoint, dtype=dtype, kv_cache_bytes=4 << 20, weights=weights)


def logits(executor: LocalExecutor, chunk: int = 64, num_tokens: int = len(PROMPT)) -> torch.Tensor:
    return prefill(executor, Blocks(executor.num_blocks).line(PROMPT[:num_tokens]), chunk)


def batched(executor: LocalExecutor) -> torch.Tensor:
    """Logits of a step with a prefill chunk and decode rows, and of one with decode rows only."""
    blocks = Blocks(executor.num_blocks)
    lines = [blocks.line(PROMPT, room=8)]
    lines += [blocks.line(PROMPT[first : first + 20], room=8) for first in range(2, 40, 2)]
    for line in lines[1:]:
        prefill(executor, line, 64)
        line.token_ids.append(11)
    first = advance(executor, [(lines[0], 50), *((line, 1) for line in lines[1:])])
    for line in lines[1:]:
        line.token_ids.append(13)
    return torch.cat([first, advance(executor, [(line, 1) for line in lines])])


def assert_same(found: LocalExecutor, expected: LocalExecutor) -> None:
    assert found.revision == expected.revision
    assert found.kv_layout == expected.kv_layout
    for chunk, num_tokens in ((1, 20), (40, 90), (90, 90)):
        ours, theirs = (logits(each, chunk, num_tokens) for each in (found, expected))
        assert torch.equal(ours, theirs), f"chunks of {chunk}"
    assert torch.equal(batched(found), batched(expected))


@pytest.mark.parametrize(("name", "shape"), in_short_run(SHORT, product(MODELS, SHAPES)))
def test_logits_equal_those_of_dense_weights(tmp_path: Path, name: str, shape: str) -> None:
    family, options = MODELS[name]
    FAMILIES[family].write(tmp_path / "model", **{**SHAPES[shape], **options})
    found = load(tmp_path / "model", "compressed")
    report = found.weights
    assert report.num_compressed > 0.9 * (report.num_compressed + report.num_plain)
    assert report.num_compressed_bytes < 2 * report.num_compressed
    assert_same(found, load(tmp_path / "model", "dense"))


def test_logits_are_equal_without_the_custom_gemm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (compressed_weight, lane_linear, linear):
        monkeypatch.setattr(module, "can_pack_bf16", lambda weight: False)
    write_llama(tmp_path / "model", tie_word_embeddings=True, **WIDE)
    found = load(tmp_path / "model", "compressed")
    assert found.computer.model.lm_head.weight.order == "rows"
    assert_same(found, load(tmp_path / "model", "dense"))


def test_tied_weight_is_stored_once(tmp_path: Path, cache: Path) -> None:
    write_llama(tmp_path / "model", tie_word_embeddings=True, **WIDE)
    executor = load(tmp_path / "model", "compressed")
    model, report = executor.computer.model, executor.weights
    assert isinstance(model.lm_head.weight, CompressedWeight)
    assert model.lm_head.weight is model.embed_tokens.weight
    (packed,) = cache.glob("*.packed")
    num_bytes = report.num_compressed_bytes + report.num_plain_bytes
    assert num_bytes <= packed.stat().st_size < num_bytes + 16_000  # and the header


@pytest.mark.parametrize("dtype", in_short_run(["float32"], ["float32", "float16"]))
def test_other_dtypes_are_not_compressed(tmp_path: Path, dtype: str) -> None:
    write_llama(tmp_path / "model", **WIDE)
    with capture_logs() as logs:
        found = load(tmp_path / "model", "compressed", dtype)
    (logged,) = (entry for entry in logs if entry["event"] == "weights_compressed")
    assert logged["num_compressed"] == 0
    assert logged["num_plain"] == found.weights.num_plain > 100_000
    assert torch.equal(logits(found), logits(load(tmp_path / "model", "dense", dtype)))


def test_start_logs_the_savings(tmp_path: Path) -> None:
    write_llama(tmp_path / "model", **WIDE)
    with capture_logs() as logs:
        load(tmp_path / "model", "compressed")
        load(tmp_path / "model", "dense")
    (logged,) = (entry for entry in logs if entry["event"] == "weights_compressed")
    assert 11 < logged["bits_per_weight"] < 12.5
    assert 0.01 < logged["verbatim_share"] < 0.1
    assert logged["num_compressed_bytes"] * 8 == pytest.approx(
        logged["bits_per_weight"] * logged["num_compressed"], rel=1e-3
    )


def test_weights_without_a_cache_are_compressed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_llama(tmp_path / "model", attention_bias=True, tie_word_embeddings=True, **WIDE)
    expected = load(tmp_path / "model", "dense")
    monkeypatch.setenv("HEARTH_CACHE_DIR", str(tmp_path / "model" / "config.json" / "cache"))
    found = load(tmp_path / "model", "compressed")
    assert found.computer.model.lm_head.weight is found.computer.model.embed_tokens.weight
    assert found.weights.num_compressed > 100_000
    assert_same(found, expected)


def test_weights_are_compressed_as_they_arrive(tmp_path: Path) -> None:
    """As on a device, where the dense weights have no room: the model's own are on meta."""
    write_llama(tmp_path, tie_word_embeddings=True, **WIDE)
    config, meta = read_config(tmp_path), torch.device("meta")
    model = empty_model(tmp_path, config, "bfloat16", CPU, num_positions=64, weights_on=meta)
    with open_checkpoint(tmp_path) as tensors, ThreadPoolExecutor(3) as readers:
        compress_weights(model, model.weight_destinations(), tensors, CPU, readers)
        expected = read_tensor(tensors, "model.layers.1.mlp.down_proj.weight").bfloat16()
        norm = read_tensor(tensors, "model.norm.weight").bfloat16()
    assert not any(each.is_meta for each in (*model.parameters(), *model.buffers()))
    assert isinstance(model.lm_head.weight, CompressedWeight)
    assert model.lm_head.weight is model.embed_tokens.weight
    found = select_rows(model.layers[1].mlp.down_proj.weight, torch.arange(len(expected)))
    assert torch.equal(found, expected)
    assert torch.equal(model.norm.weight, norm)


def test_dense_and_compressed_weights_have_separate_files(tmp_path: Path, cache: Path) -> None:
    write_llama(tmp_path / "model", **WIDE)
    for weights in ("dense", "compressed", "auto", "compressed"):
        load(tmp_path / "model", weights)
    sizes = sorted(each.stat().st_size for each in cache.glob("*.packed"))
    assert len(sizes) == 2
    assert sizes[0] < 0.8 * sizes[1]


@pytest.mark.parametrize("position", [100, 0.3, 0.9, -200], ids=str)
def test_damaged_file_is_built_again(tmp_path: Path, cache: Path, position: float) -> None:
    write_llama(tmp_path / "model", **WIDE)
    expected = logits(load(tmp_path / "model", "compressed"))
    (path,) = cache.glob("*.packed")
    original = path.read_bytes()
    content = bytearray(original)
    content[int(position * len(original)) if isinstance(position, float) else position] ^= 1
    path.write_bytes(content)
    assert torch.equal(logits(load(tmp_path / "model", "compressed")), expected)
    assert path.read_bytes() == original


def test_auto_compresses_bundles_on_cuda_and_with_amx(
    tmp_path: Path,
) -> None:
    def compressed_by_form(device: str) -> list[bool]:
        forms = ("auto", "dense", "compressed")
        return [uses_compressed(each, tmp_path, torch.device(device)) for each in forms]

    assert compressed_by_form("cpu") == compressed_by_form("cuda") == [False, False, True]
    (tmp_path / "hearth_bundle.json").touch()
    assert compressed_by_form("cpu") == [has_amx(), False, True]
    assert compressed_by_form("cuda") == [True, False, True]


def test_unknown_weight_form_is_rejected(tmp_path: Path) -> None:
    write_llama(tmp_path / "model")
    with pytest.raises(ConfigError, match="weights 'small' is none of auto, dense, compressed"):
        load(tmp_path / "model", "small")


SERVE = """
import sys
from pathlib import Path
from shared.engine.executors.load import load_executor
from shared.engine.executors.loading.model_loading import empty_model
from shared.engine.executors.local_executor import LocalExecutor
from tests.support.engine.steps import Blocks, generate

def memory(field):
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024

def serve(folder):
    options = {"dtype": "bfloat16", "kv_cache_bytes": 4 << 20, "weights": "compressed"}
    executor = load_executor(folder, **options)
    tokens = generate(executor, Blocks(executor.num_blocks).line(range(3, 70), room=8), 8)
    return executor

small, large = sys.argv[1:]
kept = serve(small)
Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts here
before = memory("VmRSS:")
also_kept = serve(large)
print(memory("VmHWM:") - before)
"""


@pytest.mark.long
def test_peak_memory_is_below_that_of_dense_weights(tmp_path: Path, cache: Path) -> None:
    """Also while the packed file is built. The compressed weights are mapped, so they count."""
    wide = {"hidden_size": 512, "intermediate_size": 1024, "vocab_size": 8192}
    # Both models use the same kernels, whose code is in memory before the measurement.
    for name, num_layers in (("small", 1), ("large", 12)):
        changes = {**wide, "num_hidden_layers": num_layers}
        write_model(tmp_path / name, "LlamaForCausalLM", dtype=torch.bfloat16, **changes)
    first, later = _growth(tmp_path), _growth(tmp_path)
    dense = (tmp_path / "large" / "model.safetensors").stat().st_size
    packed = max(each.stat().st_size for each in cache.glob("*.packed"))  # it is mapped in full
    assert packed < 0.73 * dense
    # At first the checkpoint is mapped, too, and one tensor is decoded.
    assert first - packed - dense < 0.6 * dense
    assert later - packed < 0.35 * dense


def _growth(folder: Path) -> int:
    """Bytes that a process takes which serves the large model after the small one."""
    compiled = {"NUMBA_CACHE_DIR": numba.config.CACHE_DIR, "NUMBA_NUM_THREADS": "1"}
    environ = {**os.environ, **compiled, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", SERVE, str(folder / "small"), str(folder / "large")]
    done = subprocess.run(
        command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout.split()[-1])
