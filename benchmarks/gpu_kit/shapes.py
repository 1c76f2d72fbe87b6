"""The sizes of a part's model: Llama 3.1 8B's on a device, small ones in a dry run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

CONFIG_8B: dict[str, Any] = {  # the relevant part of its config.json
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "torch_dtype": "bfloat16",
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "eos_token_id": 128_001,
}
# Kernels are launched as for 8B, with as many heads a KV head and a head of the same size.
CONFIG_SMALL = CONFIG_8B | {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "eos_token_id": 2,
}


@dataclass(frozen=True)
class Shapes:
    """The shapes of a model and of its measurements.

    `batches` has the most informative size first. `prompt` and `context` are in tokens.
    """

    config: dict[str, Any]
    batches: tuple[int, ...]
    context: int
    prompt: int
    chunks: tuple[int, ...]
    block_size: int = 64  # a CUDA worker's by default
    hidden: int = field(init=False)
    inner: int = field(init=False)
    heads: int = field(init=False)
    kv_heads: int = field(init=False)
    head_dim: int = field(init=False)
    layers: int = field(init=False)
    vocab: int = field(init=False)

    def __post_init__(self) -> None:
        for name, key in (
            ("hidden", "hidden_size"),
            ("inner", "intermediate_size"),
            ("heads", "num_attention_heads"),
            ("kv_heads", "num_key_value_heads"),
            ("head_dim", "head_dim"),
            ("layers", "num_hidden_layers"),
            ("vocab", "vocab_size"),
        ):
            object.__setattr__(self, name, self.config[key])


EIGHT_B = Shapes(CONFIG_8B, (1, 64, 8, 256), context=2048, prompt=8192, chunks=(8192, 2048, 512))
SMALL = Shapes(CONFIG_SMALL, (1, 3), context=64, prompt=48, chunks=(48, 16))
