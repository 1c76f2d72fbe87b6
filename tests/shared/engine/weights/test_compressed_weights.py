"""An engine over compressed weights: the same bits as a dense one, and never the dense weights."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numba
import pytest
import torch
from structlog.testing import capture_logs

from kernels.cpu.gemm import compressed_weight, linear
from kernels.cpu.gemm.compressed_weight import CompressedWeight
from kernels.cpu.gemm.decompress_rows import select_rows
from kernels.cpu.simd.cpu_features import has_amx
from shared.engine.models.checkpoint_config import read_config
from shared.engine.models.decoder import Decoder
from shared.engine.runners.load import load_runner
from shared.engine.runners.model_runner import ModelRunner
from shared.engine.weights.load import load_weights, open_checkpoint
from shared.engine.weights.shared_weights import compress_in_place
from shared.engine.weights.weight_form import uses_compressed
from shared.errors import ConfigError
from tests.shared.engine.support.checkpoints import write_llama, write_model
from tests.shared.engine.support.families import FAMILIES
from tests.shared.engine.support.steps import Blocks, advance, prefill

ROOT = Path(__file__).parents[4]
PROMPT = [5 + 7 * index % 180 for index in range(90)]
WIDE = {"hidden_size": 96, "intermediate_size": 160, "vocab_size": 224, "head_dim": 32}
# ends within blocks: of the hidden size, of the inner one, of the vocabulary
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


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HEARTH_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "weights"


def load(checkpoint: Path, weights: str, dtype: str = "bfloat16") -> ModelRunner:
    return load_runner(checkpoint, dtype=dtype, kv_cache_bytes=4 << 20, weights=weights)


def logits(runner: ModelRunner, chunk: int = 64) -> torch.Tensor:
    return prefill(runner, Blocks(runner.num_blocks).line(PROMPT), chunk)


def batched(runner: ModelRunner) -> torch.Tensor:
    """A prompt's chunk beside sequences that decode, and then all of them one token each."""
    blocks = Blocks(runner.num_blocks)
    lines = [blocks.line(PROMPT[first:], room=8) for first in range(0, 40, 2)]
    for line in lines[1:]:
        prefill(runner, line, 64)
        line.token_ids.append(11)
    first = advance(runner, [(lines[0], 50), *((line, 1) for line in lines[1:])])
    for line in lines[1:]:
        line.token_ids.append(13)
    return torch.cat([first, advance(runner, [(line, 1) for line in lines])])


def assert_same(found: ModelRunner, expected: ModelRunner) -> None:
    assert found.revision == expected.revision
    assert found.kv_format == expected.kv_format
    for chunk in (1, 40, 90):
        assert torch.equal(logits(found, chunk), logits(expected, chunk)), f"chunks of {chunk}"
    assert torch.equal(batched(found), batched(expected))


@pytest.mark.parametrize("shape", [WIDE, ODD], ids=["whole tiles", "odd shapes"])
@pytest.mark.parametrize("name", MODELS)
def test_logits_have_the_bits_of_dense_weights(
    tmp_path: Path, name: str, shape: dict[str, int]
) -> None:
    family, options = MODELS[name]
    FAMILIES[family].write(tmp_path / "model", **{**shape, **options})
    found = load(tmp_path / "model", "compressed")
    report = found.weights
    assert report.num_compressed > 0.9 * (report.num_compressed + report.num_plain)
    assert report.num_compressed_bytes < 2 * report.num_compressed
    assert_same(found, load(tmp_path / "model", "dense"))


def test_without_products_of_our_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (compressed_weight, linear):
        monkeypatch.setattr(module, "can_pack_halves", lambda weight: False)
    write_llama(tmp_path / "model", tie_word_embeddings=True, **WIDE)
    found = load(tmp_path / "model", "compressed")
    assert found.executor.model.lm_head.weight.order == "rows"
    assert_same(found, load(tmp_path / "model", "dense"))


def test_a_tied_weight_is_kept_once(tmp_path: Path, cache: Path) -> None:
    write_llama(tmp_path / "model", tie_word_embeddings=True, **WIDE)
    runner = load(tmp_path / "model", "compressed")
    model, report = runner.executor.model, runner.weights
    assert isinstance(model.lm_head.weight, CompressedWeight)
    assert model.lm_head.weight is model.embed_tokens.weight
    (packed,) = cache.glob("*.packed")
    num_bytes = report.num_compressed_bytes + report.num_plain_bytes
    assert num_bytes <= packed.stat().st_size < num_bytes + 16_000  # and the header


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_other_dtypes_pass_through(tmp_path: Path, dtype: str) -> None:
    write_llama(tmp_path / "model", **WIDE)
    with capture_logs() as logs:
        found = load(tmp_path / "model", "compressed", dtype)
    (told,) = (entry for entry in logs if entry["event"] == "weights_compressed")
    assert told["num_compressed"] == 0
    assert told["num_plain"] == found.weights.num_plain > 100_000
    assert torch.equal(logits(found), logits(load(tmp_path / "model", "dense", dtype)))


def test_a_start_tells_what_it_saves(tmp_path: Path) -> None:
    write_llama(tmp_path / "model", **WIDE)
    with capture_logs() as logs:
        load(tmp_path / "model", "compressed")
        load(tmp_path / "model", "dense")
    (told,) = (entry for entry in logs if entry["event"] == "weights_compressed")
    assert 11 < told["bits_per_weight"] < 12.5
    assert 0.01 < told["verbatim_share"] < 0.1
    assert told["num_compressed_bytes"] * 8 == pytest.approx(
        told["bits_per_weight"] * told["num_compressed"], rel=1e-3
    )


def test_weights_of_ones_own_are_compressed_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_llama(tmp_path / "model", attention_bias=True, tie_word_embeddings=True, **WIDE)
    expected = load(tmp_path / "model", "dense")
    monkeypatch.setenv("HEARTH_CACHE_DIR", str(tmp_path / "model" / "config.json" / "cache"))
    found = load(tmp_path / "model", "compressed")
    assert found.executor.model.lm_head.weight is found.executor.model.embed_tokens.weight
    assert found.weights.num_compressed > 100_000
    assert_same(found, expected)


def test_a_filled_model_is_compressed_in_place(tmp_path: Path) -> None:
    """As on a device to which it was brought first."""
    write_llama(tmp_path, tie_word_embeddings=True, **WIDE)
    model = Decoder(read_config(tmp_path), dtype=torch.bfloat16, num_positions=64)
    with open_checkpoint(tmp_path) as tensors:
        load_weights(tensors, model.weight_destinations())
        expected = tensors.read("model.layers.1.mlp.down_proj.weight").bfloat16()
    compress_in_place(model, model.weight_destinations())
    assert isinstance(model.lm_head.weight, CompressedWeight)
    assert model.lm_head.weight is model.embed_tokens.weight
    found = select_rows(model.layers[1].mlp.down_proj.weight, torch.arange(len(expected)))
    assert torch.equal(found, expected)


def test_both_forms_have_files_of_their_own(tmp_path: Path, cache: Path) -> None:
    write_llama(tmp_path / "model", **WIDE)
    for weights in ("dense", "compressed", "auto", "compressed"):
        load(tmp_path / "model", weights)
    sizes = sorted(each.stat().st_size for each in cache.glob("*.packed"))
    assert len(sizes) == 2
    assert sizes[0] < 0.8 * sizes[1]


@pytest.mark.parametrize("position", [100, 0.3, 0.9, -200], ids=str)
def test_a_damaged_file_is_built_again(tmp_path: Path, cache: Path, position: float) -> None:
    write_llama(tmp_path / "model", **WIDE)
    expected = logits(load(tmp_path / "model", "compressed"))
    (path,) = cache.glob("*.packed")
    whole = path.read_bytes()
    content = bytearray(whole)
    content[int(position * len(whole)) if isinstance(position, float) else position] ^= 1
    path.write_bytes(content)
    assert torch.equal(logits(load(tmp_path / "model", "compressed")), expected)
    assert path.read_bytes() == whole


def test_what_is_compressed_on_disk_is_so_in_memory_where_that_costs_no_time(
    tmp_path: Path,
) -> None:
    def wanted(device: str) -> list[bool]:
        forms = ("auto", "dense", "compressed")
        return [uses_compressed(each, tmp_path, torch.device(device)) for each in forms]

    assert wanted("cpu") == wanted("cuda") == [False, False, True]
    (tmp_path / "hearth_bundle.json").touch()
    assert wanted("cpu") == [has_amx(), False, True]
    assert wanted("cuda") == [True, False, True]


def test_a_form_that_there_is_not(tmp_path: Path) -> None:
    write_llama(tmp_path / "model")
    with pytest.raises(ConfigError, match="weights 'small' is none of auto, dense, compressed"):
        load(tmp_path / "model", "small")


SERVE = """
import sys
from pathlib import Path
from shared.engine.runners.load import load_runner
from shared.engine.runners.model_runner import ModelRunner
from tests.shared.engine.support.steps import Blocks, generate

def memory(field):
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024

def serve(folder):
    options = {"dtype": "bfloat16", "kv_cache_bytes": 4 << 20, "weights": "compressed"}
    runner = load_runner(folder, **options)
    tokens = generate(runner, Blocks(runner.num_blocks).line(range(3, 70), room=8), 8)
    return runner

small, large = sys.argv[1:]
kept = serve(small)
Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts here
before = memory("VmRSS:")
also_kept = serve(large)
print(memory("VmHWM:") - before)
"""


@pytest.mark.parametrize("is_first_start", [True, False])
def test_the_plain_weights_are_never_in_memory_together(
    tmp_path: Path, cache: Path, is_first_start: bool
) -> None:
    """Not even while the packed file is built; the compressed ones are counted, being mapped."""
    wide = {"hidden_size": 512, "intermediate_size": 1024, "vocab_size": 8192}
    # The same kernels: their code is in memory before.
    for name, num_layers in (("small", 1), ("large", 12)):
        changes = {**wide, "num_hidden_layers": num_layers}
        write_model(tmp_path / name, "LlamaForCausalLM", dtype=torch.bfloat16, **changes)
    if not is_first_start:
        load(tmp_path / "large", "compressed")
    compiled = {"NUMBA_CACHE_DIR": numba.config.CACHE_DIR, "NUMBA_NUM_THREADS": "1"}
    environ = {**os.environ, **compiled, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", SERVE, str(tmp_path / "small"), str(tmp_path / "large")]
    done = subprocess.run(
        command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    plain = (tmp_path / "large" / "model.safetensors").stat().st_size
    packed = max(each.stat().st_size for each in cache.glob("*.packed"))
    grown = int(done.stdout.split()[-1]) - packed  # which is mapped whole
    assert packed < 0.73 * plain
    if is_first_start:  # what is read of the checkpoint is mapped, too; and a tensor lies filled
        assert grown - plain < 0.6 * plain
    else:
        assert grown < 0.35 * plain
