"""Peak memory of a prompt of 2,048 tokens with experts of four bits, over their file and the KV.

    python -m benchmarks.compression.quantized_memory [--layers 12] [--hidden 1024] [--experts 16]

A random checkpoint is written, loaded in a process of its own, and prefilled in the CPU's default
steps of 512 tokens. A model of a few MB loads and runs first, so that libraries and compiled code
are resident before: what the large one adds to them is judged, with the pages of its file that are
mapped. The second of two runs counts: the first packs the weights. What is on top are activations
of a step, which do not grow with the weights: with twice the layers they are half the share.
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
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.compression.quantized import CONFIGS
from benchmarks.report import Row, at_most, write_result
from shared.block_hash import root_hash
from shared.config import CPU_BATCH_TOKENS
from shared.engine.batching.sequence import Sequence
from shared.engine.engine import Engine
from shared.engine.executors.load import load_executor
from shared.engine.executors.loading.model_loading import kv_layout_of
from shared.engine.models.checkpoint_config import read_config
from shared.engine.models.decoder import Decoder
from shared.engine.weights.dummy_weights import DummyTensors
from shared.engine.weights.weight_source import read_tensor
from shared.messages import SamplingParams

PROMPT_TOKENS, BLOCK = 2048, 16
VOCABULARY = 8192
MOST = 1.05


def write_checkpoint(folder: Path, *, hidden: int, num_layers: int, num_experts: int) -> None:
    """Random codes; embedding, head, routers and attention are BF16."""
    folder.mkdir()
    int4 = {**CONFIGS["int4"], "ignore": ["lm_head", r"re:.*self_attn.*", r"re:.*mlp\.gate$"]}
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "dtype": "bfloat16",
        "vocab_size": VOCABULARY,
        "hidden_size": hidden,
        "intermediate_size": hidden,
        "moe_intermediate_size": hidden,
        "num_experts": num_experts,
        "num_experts_per_tok": 2,
        "num_hidden_layers": num_layers,
        "num_attention_heads": hidden // 128,
        "num_key_value_heads": max(1, hidden // 512),
        "head_dim": 128,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "quantization_config": int4,
    }
    (folder / "config.json").write_text(json.dumps(config))
    read = read_config(folder)
    with torch.device("meta"):
        model = Decoder(read, dtype=torch.bfloat16, num_positions=1)
    destinations = model.weight_destinations()
    source = DummyTensors(folder, destinations)
    tensors = {
        name: read_tensor(source, name).to(each.dtype) for name, each in destinations.items()
    }
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def resident_bytes(field: str) -> int:
    """Returns resident bytes: `VmRSS` is the present value, `VmHWM` the maximum since the last
    reset.
    """
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field))


def load(folder: Path) -> tuple[Any, Engine]:
    layout = kv_layout_of(read_config(folder), "bfloat16", BLOCK)
    num_blocks = PROMPT_TOKENS // BLOCK + 1
    executor = load_executor(
        folder, dtype="bfloat16", kv_cache_bytes=num_blocks * layout.block_bytes
    )
    engine = Engine(
        num_blocks=executor.num_blocks,
        block_size=BLOCK,
        max_context_tokens=executor.max_context_tokens,
        max_batch_tokens=CPU_BATCH_TOKENS,
        max_sequences=1,
    )
    return executor, engine


async def prefill(executor: Any, engine: Engine) -> None:
    engine.add(
        Sequence(
            sequence_id=bytes(24),
            tenant_id="tenant",
            cache_root=root_hash("tenant", "weights"),
            token_ids=[(n * 7 + n * n % 1009) % (VOCABULARY - 8) + 3 for n in range(PROMPT_TOKENS)],
            num_prompt_tokens=PROMPT_TOKENS,
            sampling=SamplingParams(seed=1, max_tokens=1, temperature=0.0),
        )
    )
    while not engine.is_idle:
        rows, _ = engine.schedule()
        engine.apply(rows, await executor.result(executor.submit(rows)))


def measured(small: Path, large: Path) -> dict[str, int]:
    """Bytes, in this process."""
    executor, engine = load(small)
    asyncio.run(prefill(executor, engine))
    del executor, engine
    gc.collect()
    before = resident_bytes("VmRSS")
    executor, engine = load(large)
    loaded = resident_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    asyncio.run(prefill(executor, engine))
    return {
        "before": before,
        "loaded": loaded - before,
        "peak": resident_bytes("VmHWM") - before,
        "after": resident_bytes("VmRSS") - before,
        "file": (large / "model.safetensors").stat().st_size,
        "kv": executor.computer.kv_cache.nbytes,
    }


def in_child(folder: Path) -> dict[str, int]:
    command = [
        sys.executable,
        "-m",
        "benchmarks.compression.quantized_memory",
        "--child",
        str(folder),
    ]
    environ = {**os.environ, "HEARTH_CACHE_DIR": str(folder / "cache")}
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, env=environ)
    found: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return found


def memory_row(found: dict[str, int]) -> Row:
    expected = found["file"] + found["kv"]
    return {
        "case": "int4 experts, prefill 2048",
        **{f"{name}_mb": round(size / 1e6, 1) for name, size in found.items()},
        "peak_over_file_and_kv": round(found["peak"] / expected, 4),
    }


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.child is not None:
        print(json.dumps(measured(options.child / "small", options.child / "large")))
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_checkpoint(folder / "small", hidden=256, num_layers=1, num_experts=4)
        shape = {"num_layers": options.layers, "num_experts": options.experts}
        write_checkpoint(folder / "large", hidden=options.hidden, **shape)
        in_child(folder)
        row = memory_row(in_child(folder))
    bars = [at_most("peak / (file + KV)", row["peak_over_file_and_kv"], MOST, "")]
    command = ["-m", "benchmarks.compression.quantized_memory", *argv]
    write_result("quantized_memory", [row], bars, command)


if __name__ == "__main__":
    main(sys.argv[1:])
