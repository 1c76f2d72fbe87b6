"""Rotary frequencies and tables, compared with those of transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from shared.engine.layers.rotary import inverse_frequencies, rotary_tables
from shared.engine.model_config.model_config import RopeConfig
from shared.engine.models.rope_config import dynamic_theta, rope_config, rope_fields, served_context

CONTEXT = 4096
HEAD_DIM = 24
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0 + 0.1 * pair for pair in range(12)],
    "long_factor": [1.0 + 2.5 * pair for pair in range(12)],
}
ROPES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    },
    "llama3, one step": {
        "rope_type": "llama3",
        "factor": 16.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 1.0,
        "original_max_position_embeddings": 512,
    },
    "yarn": YARN,
    "yarn, attention factor": {**YARN, "attention_factor": 0.7},
    "yarn, mscale": {**YARN, "mscale": 0.8, "mscale_all_dim": 1.3},
    "yarn, one mscale": {**YARN, "mscale": 0.8},
    "yarn, betas": {**YARN, "beta_fast": 20.0, "beta_slow": 3.0},
    "yarn, not truncated": {**YARN, "truncate": False},
    "yarn, no ramp": {**YARN, "beta_fast": 1.5, "beta_slow": 1.5, "truncate": False},
    "yarn, a short context": {**YARN, "original_max_position_embeddings": 16},
    "yarn, half a head": {**YARN, "partial_rotary_factor": 0.5},
    "longrope": {**LONGROPE, "original_max_position_embeddings": 1024},
    "longrope, factor": {**LONGROPE, "original_max_position_embeddings": 1024, "factor": 2.0},
    "longrope, attention factor": {
        **LONGROPE,
        "original_max_position_embeddings": 1024,
        "attention_factor": 1.25,
    },
    "longrope, never longer": {**LONGROPE, "original_max_position_embeddings": CONTEXT},
}


def _transformers(
    written: dict[str, Any], context: int | None = None
) -> tuple[torch.Tensor, float]:
    """Frequencies and attention factor for sequences of `context` tokens."""
    config = LlamaConfig(
        hidden_size=2 * HEAD_DIM,
        num_attention_heads=2,
        head_dim=HEAD_DIM,
        max_position_embeddings=CONTEXT,
        rope_parameters={"rope_theta": 5_000.0, **written},
    )
    return ROPE_INIT_FUNCTIONS[written["rope_type"]](config, seq_len=context)


def _ours(written: dict[str, Any]) -> RopeConfig:
    return rope_config(_fields(written))


def _fields(written: dict[str, Any]) -> Any:
    context = {"head_dim": HEAD_DIM, "max_position_embeddings": CONTEXT, "rope_theta": 5_000.0}
    return rope_fields({**context, **written})


@pytest.mark.parametrize("kind", ROPES)
def test_frequencies_match_transformers_at_served_context(kind: str) -> None:
    expected, attention_factor = _transformers(ROPES[kind], context=CONTEXT)
    rope = _ours(ROPES[kind])
    torch.testing.assert_close(inverse_frequencies(rope), expected, rtol=2e-6, atol=0)
    assert rope.attention_factor == pytest.approx(attention_factor)


def test_longrope_uses_long_factors_in_short_contexts_too() -> None:
    kind = ROPES["longrope"]
    short, _ = _transformers(kind, context=1024)
    assert not torch.allclose(inverse_frequencies(_ours(kind)), short)


def test_dynamic_theta_grows_only_beyond_the_context() -> None:
    """Theta is constant up to the served context, and equals transformers' beyond it."""
    fields = _fields(ROPES["dynamic"])
    assert served_context(fields) == CONTEXT
    for context in (1, 100, CONTEXT):
        assert dynamic_theta(fields, context) == 5_000.0
    expected, _ = _transformers(ROPES["dynamic"], context=3 * CONTEXT)
    longer = RopeConfig(theta=dynamic_theta(fields, 3 * CONTEXT), rotary_dim=HEAD_DIM)
    torch.testing.assert_close(inverse_frequencies(longer), expected, rtol=2e-6, atol=0)


@pytest.mark.parametrize(
    ("changes", "context"),
    [
        ({}, CONTEXT),
        ({"original_max_position_embeddings": 2048}, 2 * CONTEXT),
        ({"original_max_position_embeddings": CONTEXT}, 4 * CONTEXT),
        ({"original_max_position_embeddings": None}, CONTEXT),
        ({"factor": None}, CONTEXT),
        ({"factor": 1.5}, CONTEXT),
    ],
)
def test_yarn_serves_its_factor_times_the_original_context(
    changes: dict[str, Any], context: int
) -> None:
    assert served_context(_fields({**YARN, **changes})) == context


def test_tables_include_each_ropes_attention_factor() -> None:
    unscaled = RopeConfig(theta=10_000.0, rotary_dim=8)
    factored = RopeConfig(theta=100.0, rotary_dim=8, attention_factor=1.5)
    cos, sin = rotary_tables((unscaled, factored), 7)
    assert cos.shape == sin.shape == (7, 2, 4)
    torch.testing.assert_close((cos**2 + sin**2)[:, 0], torch.ones(7, 4))
    torch.testing.assert_close((cos**2 + sin**2)[:, 1], torch.full((7, 4), 2.25))
    torch.testing.assert_close(cos[3, 1], 1.5 * torch.cos(3 * inverse_frequencies(factored)))
