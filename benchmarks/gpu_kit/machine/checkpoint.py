"""A start with weights in files: a few layers of the 8B shape, read from memory.

`weights_s` is the time of the reads and copies to the device, beside which kernels are
compiled; the rest of `seconds` is mostly the digest of the files and the first step.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.gpu_kit.session import Session

if TYPE_CHECKING:
    import torch

LAYERS = {"device": 8, "dry": 1, "compile": 2}
VOCAB = 2048  # the head and the embeddings are a small part, as of all layers
LAYERS_OF_FILE = 2
MEMORY = Path("/dev/shm")  # as fast as the page cache; a disk may take longer to write
WEIGHT_SCALE = 0.02


def run(session: Session) -> None:
    from benchmarks.gpu_kit.model_steps.loading import load

    layers = LAYERS[session.mode]
    config = session.shapes.config | {"num_hidden_layers": layers, "vocab_size": VOCAB}
    config["eos_token_id"] = 2
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(config))
        num_bytes = 0 if session.mode == "compile" else write(session, folder, config)
        load_format = "dummy" if session.mode == "compile" else "auto"
        started = time.perf_counter()
        _, stages = load(session, folder, "fast", load_format=load_format)
        seconds = time.perf_counter() - started
    figures: dict[str, Any] = {}
    if not session.is_dry:
        figures = {
            "seconds": round(seconds, 2),
            "weights_gb_s": round(num_bytes / stages["weights_s"] / 1e9, 2),
            **stages,
        }
    session.add(case="start from files", gib=round(num_bytes / 2**30, 2), layers=layers, **figures)


def write(session: Session, folder: Path, config: dict[str, Any]) -> int:
    """Writes the checkpoint, and returns its bytes."""
    from safetensors.torch import save_file

    num_bytes, files = 0, {}
    for number, shapes in enumerate(_files(config)):
        tensors = {
            name: _weight(session, shape, seed)
            for seed, (name, shape) in enumerate(shapes.items(), 100 * number)
        }
        num_bytes += sum(each.nbytes for each in tensors.values())
        save_file(tensors, folder / f"model-{number}.safetensors")
        files |= dict.fromkeys(tensors, f"model-{number}.safetensors")
    index = json.dumps({"weight_map": files})
    (folder / "model.safetensors.index.json").write_text(index)
    return num_bytes


def _weight(session: Session, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    import torch

    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.bfloat16)
    return session.random(*shape, scale=WEIGHT_SCALE, seed=seed).cpu().contiguous()


def _files(config: dict[str, Any]) -> Iterator[dict[str, tuple[int, ...]]]:
    """The shapes of each file's tensors, by name."""
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    yield {
        "model.embed_tokens.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (vocab, hidden),
    }
    layers = range(config["num_hidden_layers"])
    for first in layers[::LAYERS_OF_FILE]:
        found: dict[str, tuple[int, ...]] = {}
        for layer in layers[first : first + LAYERS_OF_FILE]:
            own = _layer(config)
            found |= {f"model.layers.{layer}.{name}.weight": own[name] for name in own}
        yield found


def _layer(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, inner, head = (config[k] for k in ("hidden_size", "intermediate_size", "head_dim"))
    queries, keys = (config[f"num_{k}_heads"] * head for k in ("attention", "key_value"))
    return {
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
