"""Memory of a process that loads quantized checkpoints: at most while it loads, and afterwards.

    python -m benchmarks.compression.load_memory [--case NAME] [--layers 8]

Random checkpoints of some hundred MB are written, one of each stored form, and loaded in a process
of its own, where a small one of the same form has been loaded and run before: libraries and
compiled code are resident. What the large one adds is judged, with the pages of its file that are
mapped, without its KV cache. A worker packs its weights before it is ready.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.compression.quantized_memory import VOCABULARY, load, prefill, resident_bytes
from benchmarks.report import Row, at_most, write_result
from shared.engine.quantize.stacked_mxfp4 import CONFIG as MXFP4
from shared.engine.quantize.stacked_mxfp4 import mxfp4
from tests.support.engine.stored_formats import StoredFormat, awq, fp8, gptq, int8, packed

RESIDENT, PEAK, ALLOWED_MB = 1.03, 1.10, 200.0  # of the file's bytes; megabytes beside
DEPTH = 8  # layers of 4-bit weights; half of them of 8 bits
EXPERTS = 16
Tensors = dict[str, Tensor]


class Case(NamedTuple):
    """`form`: of all linear layers of a Llama; None: the experts of a gpt-oss are in MXFP4."""

    form: StoredFormat | None
    num_bits: int


CASES = {
    "AWQ": Case(awq(128), 4),
    "GPTQ": Case(gptq(128), 4),
    "GPTQ, desc_act": Case(gptq(128, is_ordered=True), 4),
    "GPTQ, 8 bits": Case(gptq(128, num_bits=8), 8),
    "INT8 packed": Case(packed(128), 8),
    "INT8": Case(int8(), 8),
    "FP8 per channel": Case(fp8(), 8),
    "FP8 per tensor": Case(fp8("fp8", is_per_tensor=True), 8),
    "MXFP4": Case(None, 4),
}


def write_checkpoint(folder: Path, case: Case, *, hidden: int, num_layers: int) -> None:
    """Layers have the same random weights. Embedding, head and norms are BF16."""
    folder.mkdir()
    config = {
        "dtype": "bfloat16",
        "vocab_size": VOCABULARY,
        "hidden_size": hidden,
        "num_hidden_layers": num_layers,
        "num_attention_heads": hidden // 128,
        "num_key_value_heads": max(1, hidden // 512),
        "head_dim": 128,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
    }
    write: Callable[[dict[str, Any], StoredFormat | None], Tensors]
    write = _gpt_oss if case.form is None else _llama
    layer = write(config, case.form)
    tensors = {
        "model.embed_tokens.weight": _random(VOCABULARY, hidden),
        "lm_head.weight": _random(VOCABULARY, hidden),
        "model.norm.weight": torch.ones(hidden, dtype=torch.bfloat16),
    }
    for number in range(num_layers):
        tensors |= {f"model.layers.{number}.{name}": each.clone() for name, each in layer.items()}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def _random(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(shape[0])
    return (torch.randn(shape, generator=generator) / shape[-1] ** 0.5).bfloat16()


def _llama(config: dict[str, Any], form: StoredFormat | None) -> Tensors:
    """Returns the tensors of a layer, and completes the config."""
    assert form is not None
    hidden, kv = config["hidden_size"], config["num_key_value_heads"] * 128
    inner = 4 * hidden
    config |= {
        "architectures": ["LlamaForCausalLM"],
        "intermediate_size": inner,
        "quantization_config": form.config,
    }
    found = _norms(hidden)
    for name, shape in {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }.items():
        stored = form.store(_random(*shape).float())
        found |= {f"{name}.{kind}": each.contiguous() for kind, each in stored.items()}
    return found


def _gpt_oss(config: dict[str, Any], _: StoredFormat | None) -> Tensors:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    config |= {
        "architectures": ["GptOssForCausalLM"],
        "intermediate_size": hidden,
        "num_local_experts": EXPERTS,
        "num_experts_per_tok": 4,
        "quantization_config": MXFP4,
    }
    found = _norms(hidden)
    rows = {"q_proj": heads * 128, "k_proj": 0, "v_proj": 0}
    for name in rows:
        num_rows = rows[name] or config["num_key_value_heads"] * 128
        found[f"self_attn.{name}.weight"] = _random(num_rows, hidden)
        found[f"self_attn.{name}.bias"] = _random(num_rows)
    found["self_attn.o_proj.weight"] = _random(hidden, heads * 128)
    found["self_attn.o_proj.bias"] = _random(hidden)
    found["self_attn.sinks"] = _random(heads)
    found["mlp.router.weight"] = _random(EXPERTS, hidden)
    found["mlp.router.bias"] = _random(EXPERTS)
    for name, num_rows in (("gate_up_proj", 2 * hidden), ("down_proj", hidden)):
        blocks, scales = mxfp4(_random(num_rows, hidden).float())
        path = f"mlp.experts.{name}"
        found[f"{path}_blocks"] = blocks.expand(EXPERTS, *blocks.shape).contiguous()
        found[f"{path}_scales"] = scales.expand(EXPERTS, *scales.shape).contiguous()
        found[f"{path}_bias"] = _random(EXPERTS, num_rows)
    return found


def _norms(hidden: int) -> Tensors:
    names = "input_layernorm", "post_attention_layernorm"
    return {f"{name}.weight": torch.ones(hidden, dtype=torch.bfloat16) for name in names}


def measured(small: Path, large: Path) -> dict[str, int]:
    """Bytes, in this process."""
    executor, engine = load(small)
    asyncio.run(prefill(executor, engine))
    del executor, engine
    gc.collect()
    before = resident_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    executor, _ = load(large)
    peak = resident_bytes("VmHWM")
    return {
        "file": (large / "model.safetensors").stat().st_size,
        "peak": peak - before,
        "resident": resident_bytes("VmRSS") - before,
        "kv": executor.computer.kv_cache.nbytes,
    }


def in_child(folder: Path) -> dict[str, int]:
    command = [sys.executable, "-m", "benchmarks.compression.load_memory", "--child", str(folder)]
    environ = {**os.environ, "HEARTH_CACHE_DIR": str(folder.parent / "cache")}
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, env=environ)
    found: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return found


def row_of(name: str, num_layers: int, root: Path) -> Row:
    case, folder = CASES[name], root / "model"
    folder.mkdir()
    hidden = 1024 if case.form is None else 2048
    write_checkpoint(folder / "small", case, hidden=256, num_layers=1)
    depth = num_layers * 4 // case.num_bits
    write_checkpoint(folder / "large", case, hidden=hidden, num_layers=depth)
    found = in_child(folder)
    return {
        "case": name,
        **{f"{each}_mb": round(size / 1e6, 1) for each, size in found.items()},
        "resident_over_file": round((found["resident"] - found["kv"]) / found["file"], 4),
        "peak_over_bar": round(
            (found["peak"] - found["kv"]) / (PEAK * found["file"] + ALLOWED_MB * 1e6), 4
        ),
    }


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--case", choices=CASES, action="append")
    parser.add_argument("--layers", type=int, default=DEPTH)
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.child is not None:
        print(json.dumps(measured(options.child / "small", options.child / "large")))
        return
    rows = []
    for name in options.case or CASES:
        with tempfile.TemporaryDirectory() as root:
            rows.append(row_of(name, options.layers, Path(root)))
        print(rows[-1], flush=True)
    bars = []
    for row in rows:
        resident, peak = row["resident_over_file"], row["peak_over_bar"]
        bars.append(at_most(f"{row['case']}: resident / file", resident, RESIDENT, ""))
        name = f"{row['case']}: load peak / (1.1 file + 200 MB)"
        bars.append(at_most(name, peak, 1.0, ""))
    command = ["-m", "benchmarks.compression.load_memory", *argv]
    write_result("load_memory", rows, bars, command, is_full=options.case is None)


if __name__ == "__main__":
    main(sys.argv[1:])
