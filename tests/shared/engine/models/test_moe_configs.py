"""How families with experts read their configs, and which configs they reject."""

from __future__ import annotations

from typing import Any

import pytest

from shared.engine.models import FAMILIES
from shared.engine.models.moe.fields import with_deepseek_experts
from shared.errors import CheckpointError

SIZES = {
    "vocab_size": 199,
    "hidden_size": 96,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
GLM = {**SIZES, "n_routed_experts": 8, "num_experts_per_tok": 2}


def layers_with_experts(architecture: str, **fields: Any) -> list[int]:
    config = FAMILIES[architecture]({**SIZES, **fields})
    return [index for index, layer in enumerate(config.layers) if layer.moe is not None]


def test_layers_that_are_dense() -> None:
    assert layers_with_experts("MixtralForCausalLM") == [0, 1, 2, 3]
    qwen = "Qwen3MoeForCausalLM"
    assert layers_with_experts(qwen) == [0, 1, 2, 3]
    assert layers_with_experts(qwen, decoder_sparse_step=2) == [1, 3]
    assert layers_with_experts(qwen, mlp_only_layers=[0, 2]) == [1, 3]
    assert layers_with_experts("Glm4MoeForCausalLM") == [1, 2, 3]
    assert layers_with_experts("Glm4MoeForCausalLM", first_k_dense_replace=3) == [3]


def test_layers_that_predict_later_tokens_are_left_out() -> None:
    config = FAMILIES["Glm4MoeForCausalLM"]({**GLM, "num_nextn_predict_layers": 2})
    assert config.checkpoint.dropped == (r"model\.layers\.(4|5)\.",)
    assert FAMILIES["Glm4MoeForCausalLM"](GLM).checkpoint.dropped == ()


def test_shared_experts_are_one_mlp() -> None:
    config = FAMILIES["Glm4MoeForCausalLM"](
        {**GLM, "n_shared_experts": 3, "moe_intermediate_size": 24}
    )
    assert config.layers[1].moe is not None
    assert config.layers[1].moe.shared_intermediate_size == 72


REJECTED: dict[str, tuple[dict[str, Any], str]] = {
    "too many chosen": ({"num_experts_per_tok": 9}, "9 experts per token are more than 8 experts"),
    "uneven groups": (
        {"n_group": 3},
        r"8 experts cannot be cut into 3 groups \(n_group\)",
    ),
    "too many groups": ({"n_group": 2, "topk_group": 3}, "topk_group 3 is more than n_group 2"),
    "groups of too few": (
        {"n_group": 8, "topk_group": 1},
        r"2 experts per token are more than the 1 experts of 1 groups \(topk_group\)",
    ),
    "score": (
        {"scoring_func": "softplus"},
        "scoring_func 'softplus' is not supported, only sigmoid",
    ),
    "choice": ({"topk_method": "greedy"}, "topk_method 'greedy' is not supported, only noaux_tc"),
    "activation": ({"hidden_act": "relu"}, "hidden_act 'relu' is not supported"),
    "frequency": ({"moe_layer_freq": 2}, "moe_layer_freq 2 is not supported, only 1"),
    "no experts": ({"n_routed_experts": 0}, r"at `\$.n_routed_experts`"),
}


@pytest.mark.parametrize("kind", REJECTED)
def test_unsupported_config_is_rejected_in_one_line(kind: str) -> None:
    changes, message = REJECTED[kind]
    with pytest.raises(CheckpointError, match=message) as caught:
        FAMILIES["Glm4MoeForCausalLM"]({**GLM, **changes})
    assert "\n" not in caught.value.message


def test_number_of_experts_has_no_default() -> None:
    config = FAMILIES["LlamaForCausalLM"](SIZES)
    fields = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
    with pytest.raises(CheckpointError, match="n_routed_experts is missing"):
        with_deepseek_experts(config, fields)
