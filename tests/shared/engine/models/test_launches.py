"""How many kernels a layer with experts launches at decode: each costs the host microseconds, and a
captured step a gap.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from shared.engine.executors.loading.model_loading import set_mode
from tests.shared.engine.models.test_device_step import computer_of, launched, step_function
from tests.support.engine.families import FAMILIES, Family

assert launched  # a fixture

# Sizes as a real model's, which launch no other kernels: tiles of products are cut.
HEADS = {"hidden_size": 1024, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128}
LATENTS = {
    **HEADS,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "kv_lora_rank": 512,
    "q_lora_rank": 512,
    "first_k_dense_replace": 0,
    "n_routed_experts": 32,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 256,
    "n_shared_experts": 1,
}
# Family -> its sizes, and the most launches in the exact and in the fast mode.
LAYERS: dict[str, tuple[str, dict[str, Any], dict[str, int]]] = {
    "Qwen3-MoE": (
        "qwen3 moe",
        {**HEADS, "num_experts": 32, "num_experts_per_tok": 8, "moe_intermediate_size": 256}
        | {"mlp_only_layers": [], "decoder_sparse_step": 1},
        {"exact": 17, "fast": 13},
    ),
    "Mixtral": (
        "mixtral",
        {**HEADS, "num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 512},
        {"exact": 17, "fast": 13},
    ),
    "GLM-4-MoE": (
        "glm4 moe",
        {
            **HEADS,
            "n_routed_experts": 32,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 256,
            "n_shared_experts": 1,
            "first_k_dense_replace": 0,
        },
        {"exact": 22, "fast": 13},
    ),
    "Llama 4": (
        "llama4, experts",
        {
            **HEADS,
            "num_local_experts": 16,
            "intermediate_size": 512,
            "intermediate_size_mlp": 512,
        },
        {"exact": 28, "fast": 14},
    ),
    "DeepSeek-V3": ("deepseek", LATENTS, {"exact": 27, "fast": 17}),
    "DeepSeek-V2-Lite's sizes": (
        "deepseek",
        {**LATENTS, "num_attention_heads": 16, "num_key_value_heads": 16, "q_lora_rank": None}
        | {"n_shared_experts": 2},
        {"exact": 24, "fast": 15},
    ),
}
FREE = {
    *("view", "_unsafe_view", "expand", "slice", "select", "t", "transpose", "permute", "detach"),
    *("alias", "as_strided", "unsqueeze", "squeeze", "split", "split_with_sizes", "unbind"),
    *("tensor_split", "unflatten", "empty", "new_empty", "empty_like", "zeros"),
    *("ones_like", "zeros_like"),  # the angles of all layers without rope, once a step
}


class Launches(TorchDispatchMode):
    """Counts the library's operations that compute. Memory of outputs is zeroed on CPUs alone."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.names = names

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with self:  # in inference mode, operations that are made of others arrive whole
            made = func.decompose(*args, **kwargs)
        if made is not NotImplemented:
            return made
        if func.overloadpacket.__name__ not in FREE:
            self.names.append(func.overloadpacket.__name__)
        return func(*args, **kwargs)


def launches(
    folder: Path, layer: str, num_layers: int, mode: str, num_rows: int, names: list[str]
) -> Counter[str]:
    name, sizes, _ = LAYERS[layer]
    found = FAMILIES[name]
    fields = {**found.fields, **sizes, "num_hidden_layers": num_layers}
    with patch.dict(FAMILIES, large=Family(found.architecture, fields)):
        computer = computer_of(folder, "large")
    set_mode(computer.model, mode)  # type: ignore[arg-type]
    step = step_function(computer, query_lens=[1] * num_rows, context_tokens=3000)
    step()  # constants are copied to the device once
    names.clear()
    with Launches(names):
        step()
    return Counter(names)


@pytest.mark.parametrize("mode", ["exact", "fast"])
@pytest.mark.parametrize("layer", LAYERS)
def test_layer_with_experts_launches_few_kernels(
    layer: str, mode: str, launched: list[str], tmp_path: Path
) -> None:
    most = LAYERS[layer][2][mode]
    for num_rows in (1, 64):
        one, two = (launches(tmp_path, layer, n, mode, num_rows, launched) for n in (1, 2))
        assert 0 < (two - one).total() <= most, (num_rows, sorted((two - one).items()))
