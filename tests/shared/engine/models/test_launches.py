"""How many kernels a layer with latents and experts launches: each costs the host microseconds."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from shared.engine.executors.loading.model_loading import set_mode
from tests.shared.engine.models.test_device_step import computer_of, launched, step_function
from tests.support.engine.families import DEEPSEEK, FAMILIES, Family

assert launched  # a fixture

MOST = {"exact": 40, "fast": 32}
# 64 heads, and tiles of products that are cut; other sizes launch no other kernels.
SIZES = {
    **DEEPSEEK,
    "hidden_size": 1024,
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
FREE = {
    *("view", "_unsafe_view", "expand", "slice", "select", "t", "transpose", "permute", "detach"),
    *("alias", "as_strided", "unsqueeze", "squeeze", "split", "split_with_sizes", "unbind"),
    *("tensor_split", "unflatten", "empty", "new_empty", "empty_like", "zeros"),
}


class Launches(TorchDispatchMode):
    """Counts the library's operations that compute. Memory of outputs is zeroed on CPUs alone."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.names = names

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ not in FREE:
            self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def launches(
    folder: Path, num_layers: int, mode: str, num_rows: int, names: list[str]
) -> Counter[str]:
    family = Family("DeepseekV3ForCausalLM", {**SIZES, "num_hidden_layers": num_layers})
    with patch.dict(FAMILIES, large=family):
        computer = computer_of(folder, "large")
    set_mode(computer.model, mode)  # type: ignore[arg-type]
    step = step_function(computer, query_lens=[1] * num_rows, context_tokens=3000)
    step()  # constants are copied to the device once
    names.clear()
    with Launches(names):
        step()
    return Counter(names)


@pytest.mark.parametrize("mode", MOST)
def test_layer_with_latents_and_experts_launches_few_kernels(
    mode: str, launched: list[str], tmp_path: Path
) -> None:
    for num_rows in (1, 64):
        one, two = (launches(tmp_path, num, mode, num_rows, launched) for num in (1, 2))
        assert 0 < (two - one).total() <= MOST[mode], dict(two - one)
