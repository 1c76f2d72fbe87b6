from __future__ import annotations

from itertools import chain

import pytest

from shared.engine.model_config.model_config import LayerConfig, ModelConfig, RopeConfig
from shared.engine.parallel.rank_part import RankPart, local_config, rank_part, whole_model
from shared.errors import ConfigError


def config(num_heads: int = 8, num_kv_heads: int = 2, columns: int = 256) -> ModelConfig:
    return ModelConfig(
        vocab_size=1000,
        hidden_size=64,
        intermediate_size=columns,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=32,
        max_position_embeddings=128,
        rms_norm_eps=1e-6,
        activation="silu",
        attention_scale=0.25,
        layers=(LayerConfig(),) * 6,
        ropes=(RopeConfig(theta=1e4, rotary_dim=32),),
        has_tied_embeddings=False,
    )


def parts(model: ModelConfig, tp_size: int) -> list[RankPart]:
    layers = range(model.num_layers)
    return [
        rank_part(model, tp_rank=rank, tp_size=tp_size, layers=layers) for rank in range(tp_size)
    ]


@pytest.mark.parametrize("tp_size", [1, 2, 4, 8])
@pytest.mark.parametrize("heads", [(8, 1), (8, 2), (28, 4), (32, 8), (64, 64)])
def test_ranks_hold_every_head_column_and_token_once(heads: tuple[int, int], tp_size: int) -> None:
    model = config(*heads, columns=2880)
    found = parts(model, tp_size)
    whole = whole_model(model)
    for name in ("heads", "columns", "vocabulary"):
        assert [*chain(*(getattr(each, name) for each in found))] == [*getattr(whole, name)]
    group = model.num_heads // model.num_kv_heads
    for each in found:
        assert {head // group for head in each.heads} == set(each.kv_heads)
    assert parts(model, 1) == [whole]


def test_last_unit_of_columns_may_be_short() -> None:
    assert [len(each.columns) for each in parts(config(columns=200), 4)] == [32, 64, 64, 40]


def test_more_ranks_than_heads_are_an_error() -> None:
    with pytest.raises(ConfigError, match="7 heads are too few for 8 ranks"):
        parts(config(7, 1), 8)


def test_ranks_that_share_a_key_value_head_each_hold_it() -> None:
    assert [each.kv_heads for each in parts(config(8, 2), 4)] == [
        *(range(0, 1), range(0, 1)),
        *(range(1, 2), range(1, 2)),
    ]


def test_groups_that_a_rank_would_divide_are_an_error() -> None:
    with pytest.raises(ConfigError, match="heads 0 to 6 of 12 cannot be one rank's"):
        parts(config(12, 3), 2)


@pytest.mark.parametrize("tp_size", [0, 3, 16])
def test_other_numbers_of_ranks_are_an_error(tp_size: int) -> None:
    with pytest.raises(ConfigError, match="1, 2, 4 or 8"):
        rank_part(config(), tp_rank=0, tp_size=tp_size, layers=range(6))


def test_only_the_first_stage_embeds_and_only_the_last_has_the_head() -> None:
    stages = [
        rank_part(config(), tp_rank=0, tp_size=1, layers=layers)
        for layers in (range(0, 2), range(2, 5), range(5, 6))
    ]
    assert [each.has_embedding for each in stages] == [True, False, False]
    assert [each.has_head for each in stages] == [False, False, True]
    local = local_config(config(), stages[1])
    assert (local.num_layers, local.num_heads, local.vocab_size) == (3, 8, 1000)
