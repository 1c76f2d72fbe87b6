"""The counted work of a step is that of the model's tensors, and of each query and key in turn."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from shared.engine.model_config.formats import Fp8Block, Int4, WeightFormat
from shared.engine.model_config.model_config import LayerConfig, ModelConfig
from shared.engine.model_config.quantization import ConfigGroup, Quantization
from shared.engine.models.checkpoint_config import with_formats
from shared.engine.models.decoder import Decoder
from shared.engine.parallel.rank_part import whole_model
from shared.engine.planning.rank_bytes import kv_values_per_token
from shared.engine.planning.step_work import ModelWorkload, StepWork, model_work
from shared.kv_layout import Chunk, Reach, Window
from tests.shared.engine.planning.test_rank_bytes import LATENTS, MOE, PLAIN

VARIANTS: dict[str, dict[str, Any]] = {
    "dense": {"has_qkv_bias": True},
    "tied": {"has_tied_embeddings": True},
    "windows": {"layers": tuple(LayerConfig(reach=each) for each in (Window(5), Chunk(4), None))},
    "a window beyond the context": {"layers": (LayerConfig(reach=Window(4096)),) * 2},
    "latents": LATENTS,
    "experts": {"layers": (LayerConfig(), *(LayerConfig(moe=MOE),) * 4), "hidden_size": 48},
}
# sequences as (first position, tokens): decode, prompts, chunks of prompts, all of them
STEPS = {
    "decode": [(6, 1), (0, 1), (30, 1)],
    "prompt": [(0, 19)],
    "mixed": [(3, 1), (2, 9), (16, 4), (0, 1)],
}


def config_of(name: str) -> ModelConfig:
    return replace(PLAIN, **VARIANTS[name])


def counted(config: ModelConfig, spans: list[tuple[int, int]], kv_item_bytes: int = 2) -> StepWork:
    starts, counts = zip(*spans, strict=True)
    work = model_work(config, item_bytes=2, kv_item_bytes=kv_item_bytes)
    return work.of(starts, counts, len(spans))


def model_tensors(config: ModelConfig) -> dict[str, Tensor]:
    with torch.device("meta"):
        model = Decoder(config, dtype=torch.bfloat16, num_positions=1)
    return dict(model.named_parameters())


def uses(name: str, num_tokens: int) -> tuple[float, float]:
    """Returns the shares of a tensor that a step reads, and that a token multiplies with."""
    if ".experts." not in name:
        return 1.0, 1.0
    chance = MOE.experts_per_token / MOE.num_experts
    return 1.0 - (1.0 - chance) ** num_tokens, chance


def sees(reach: Reach, query: int, key: int) -> bool:
    first = 0
    if isinstance(reach, Window):
        first = query - reach.tokens + 1
    if isinstance(reach, Chunk):
        first = query - query % reach.tokens
    return first <= key <= query


def one_by_one(config: ModelConfig, spans: list[tuple[int, int]], kv_bytes: int) -> StepWork:
    """Returns the same as `counted`, tensor by tensor and pair by pair."""
    num_tokens, tensors = sum(count for _, count in spans), model_tensors(config)
    num_bytes = num_operations = 0.0
    for name, tensor in tensors.items():
        is_head = name == "lm_head.weight" or (
            config.has_tied_embeddings and name == "model.embed_tokens.weight"
        )
        if name.endswith("embed_tokens.weight") and not config.has_tied_embeddings:
            continue
        read, used = uses(name, num_tokens)
        times = len(spans) if is_head or "layers" not in name else num_tokens
        num_bytes += read * tensor.numel() * tensor.element_size()
        num_operations += 2.0 * times * used * tensor.numel()
    key = value = config.head_dim
    token_bytes = 2 * config.num_kv_heads * config.head_dim * kv_bytes
    if config.latent is not None:
        value, key = config.latent.kv_rank, config.latent.kv_rank + config.latent.rope_dim
        token_bytes = key * kv_bytes
    for layer in config.layers:
        for start, count in spans:
            queries = range(start, start + count)
            seen = [(q, k) for q in queries for k in range(q + 1) if sees(layer.reach, q, k)]
            num_bytes += token_bytes * (len({k for _, k in seen}) + count)
            num_operations += 2 * config.num_heads * (key + value) * len(seen)
    return StepWork(num_bytes, num_operations)


@pytest.mark.parametrize("name", VARIANTS)
def test_work_is_that_of_tensors_and_pairs(name: str) -> None:
    config = config_of(name)
    for spans in STEPS.values():
        for item_bytes in (2, 1):
            expected = one_by_one(config, spans, item_bytes)
            assert counted(config, spans, item_bytes) == pytest.approx(expected, rel=1e-12), spans


def test_a_step_without_logits_does_not_read_the_head() -> None:
    config = config_of("tied")
    work = model_work(config, item_bytes=2, kv_item_bytes=2)
    none, two = (work.of([0], [7], num_logits) for num_logits in (0, 2))
    head = config.vocab_size * config.hidden_size + config.hidden_size
    assert (two.num_bytes - none.num_bytes, two.num_operations - none.num_operations) == (
        2 * head,
        4 * head,
    )


@pytest.mark.parametrize("form", [Int4(group=8, is_symmetric=True), Fp8Block()], ids=str)
def test_quantized_weights_count_as_they_are_stored(form: WeightFormat) -> None:
    quantization = Quantization(groups=(ConfigGroup(targets=("Linear",), form=form),), ignored=())
    config = with_formats(PLAIN, quantization)
    sizes = [
        sum(each.numel() * each.element_size() for each in model_tensors(which).values())
        for which in (PLAIN, config)
    ]
    dense, stored = (counted(which, [(3, 1)]) for which in (PLAIN, config))
    assert dense.num_bytes - stored.num_bytes == sizes[0] - sizes[1] > 0
    assert dense.num_operations == stored.num_operations


def test_lossless_compression_saves_bytes_alone() -> None:
    dense, stored = (
        model_work(PLAIN, item_bytes=2, kv_item_bytes=2, stored_share=share).of([0], [1], 1)
        for share in (1.0, 0.75)
    )
    kv_bytes = 2 * 2 * kv_values_per_token(PLAIN, whole_model(PLAIN))  # read and written
    assert stored.num_bytes - kv_bytes == 0.75 * (dense.num_bytes - kv_bytes)
    assert stored.num_operations == dense.num_operations


def test_experts_are_those_that_random_tokens_choose() -> None:
    work = ModelWorkload(num_experts=17, experts_per_token=5, expert_bytes=1.0)
    random, num_trials = Random(3), 2000
    for num_tokens in (1, 4, 12):
        chosen = 0
        for _ in range(num_trials):
            drawn = (random.sample(range(17), 5) for _ in range(num_tokens))
            chosen += len(set().union(*drawn))
        counts = [1] * num_tokens
        found = work.of([0] * num_tokens, counts, 0).num_bytes
        assert found == pytest.approx(chosen / num_trials, rel=0.02)
