"""Digests of the logits of tiny models: they change exactly when the bits of results do.

    python -m tests.support.engine.golden           prints those of this host
    python -m tests.support.engine.golden --write   records them, also without compiled loops
                                                           and at each level of the library

Weights are seeded numbers from a config, so that no library's random numbers enter. A digest is of
one kind of device: its instruction set, dtype and release of torch.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import torch
import xxhash

from shared.engine.executors.load import load_executor
from shared.engine.executors.local_executor import LocalExecutor
from shared.numerics import KERNELS_VERSION, Numerics
from tests.support.engine.steps import Blocks, advance, prefill
from tests.support.threads import computing_threads

ROOT = Path(__file__).resolve().parents[3]
FILE = Path(__file__).with_name("golden_bits.json")
# The compiler's target without vectors: torch's library multiplies.
GENERIC = {"NUMBA_CPU_NAME": "generic"}
# The library can be limited to each of these; a host that lacks one is at the level below.
LEVELS = [
    *("AVX2", "AVX2_VNNI", "AVX512_CORE", "AVX512_CORE_VNNI", "AVX512_CORE_BF16"),
    *("AVX512_CORE_FP16", "AVX512_CORE_AMX", "AVX512_CORE_AMX_FP16"),
]
LIMITED = [{**target, "ONEDNN_MAX_CPU_ISA": level} for target in ({}, GENERIC) for level in LEVELS]
Digests = dict[str, dict[str, str]]  # kind of device -> case -> digest
SHAPE = {
    "vocab_size": 320,
    "hidden_size": 96,
    "intermediate_size": 352,
    "num_hidden_layers": 2,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
}
GEMMA2 = {
    "architectures": ["Gemma2ForCausalLM"],
    "model_type": "gemma2",
    "hidden_activation": "gelu_pytorch_tanh",
    "sliding_window": 21,
    "query_pre_attn_scalar": 40,
    "attn_logit_softcapping": 3.0,
    "final_logit_softcapping": 5.0,
}
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu"}
# Sizes that are no blocks of 32, which the library multiplies.
ODD = {"hidden_size": 60, "intermediate_size": 100, "head_dim": 20}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {**SHAPE, **LLAMA},
    "gemma2": {**SHAPE, **GEMMA2},
    "odd llama": {**SHAPE, **LLAMA, **ODD},
}
CASES = [
    ("llama", "bfloat16", "dense"),
    ("llama", "bfloat16", "compressed"),
    ("llama", "float32", "dense"),
    ("gemma2", "bfloat16", "dense"),
    ("odd llama", "bfloat16", "compressed"),
    ("odd llama", "float16", "dense"),
    ("odd llama", "float32", "dense"),
]
PROMPT = [(7 * n + n * n) % 300 + 3 for n in range(75)]


class Golden(msgspec.Struct):
    """Recorded digests of one version of the kernels: by kind of device, then by case."""

    kernels: int
    digests: Digests


def kind_of(numerics: Numerics) -> str:
    torch_release = ".".join(torch.__version__.split(".")[:2])
    return f"{numerics.device} torch{torch_release}"


def recorded() -> Golden:
    return msgspec.json.decode(FILE.read_bytes(), type=Golden)


def digest_of(case: tuple[str, str, str], folder: Path) -> tuple[str, str]:
    """Returns the kind of device, and the digest of a prompt in two chunks and of two decode
    steps.
    """
    name, dtype, weights = case
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIGS[name]))
    with computing_threads(1):
        executor = load_executor(
            folder, dtype=dtype, weights=weights, load_format="dummy", kv_cache_bytes=1 << 20
        )
        logits = _logits(executor)
    digest = xxhash.xxh3_64_hexdigest(logits.contiguous().numpy().data)
    return kind_of(executor.numerics), digest


def _logits(executor: LocalExecutor) -> torch.Tensor:
    blocks = Blocks(executor.num_blocks)
    lines = [blocks.line(PROMPT, room=2), blocks.line(PROMPT[::-1], room=2)]
    parts = [prefill(executor, line, 48) for line in lines]
    for _ in range(2):
        for line in lines:
            line.token_ids.append(int(parts[-1].argmax()) % 300)
        parts.append(advance(executor, [(line, 1) for line in lines]))
    return torch.cat(parts)


def found_here() -> Digests:
    found: Digests = {}
    with tempfile.TemporaryDirectory() as parent:
        for case in CASES:
            name = ", ".join(case)
            kind, digest = digest_of(case, Path(parent, name))
            found.setdefault(kind, {})[name] = digest
    return found


def found_in_child(**environ: str) -> Digests:
    child = subprocess.run(
        [sys.executable, "-m", "tests.support.engine.golden"],
        cwd=ROOT,
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        check=True,
    )
    found: Digests = json.loads(child.stdout.strip().splitlines()[-1])
    return found


def merge(known: Digests, found: Digests) -> None:
    """Adds to `known`. Raises ValueError if one kind of device has two digests."""
    for kind, digests in found.items():
        for case, digest in digests.items():
            other = known.setdefault(kind, {}).setdefault(case, digest)
            if other != digest:
                raise ValueError(f"{kind} names unlike bits of {case}: {other}, {digest}")


def write() -> None:
    golden = recorded() if FILE.exists() else Golden(KERNELS_VERSION, {})
    found: Digests = {}
    for environ in ({}, GENERIC, *LIMITED):
        merge(found, found_in_child(**environ))
    kept = golden.digests if golden.kernels == KERNELS_VERSION else {}
    digests = {kind: {**kept.get(kind, {}), **found.get(kind, {})} for kind in {**kept, **found}}
    written = {"kernels": KERNELS_VERSION, "digests": digests}
    FILE.write_text(json.dumps(written, indent=1, sort_keys=True) + "\n")


def main() -> None:
    if "--write" in sys.argv:
        write()
    print(json.dumps(found_here()))


if __name__ == "__main__":
    main()
