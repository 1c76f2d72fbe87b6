"""Every peculiarity of latent attention shows in the logits of the tiny model; bad configs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from shared.engine.executors import cpu_executor
from shared.engine.executors.load import load_executor
from shared.engine.layers import latent_attention
from shared.engine.model_config.checkpoint_form import CheckpointForm
from shared.engine.model_config.model_config import ModelConfig
from shared.engine.models.checkpoint_config import read_config
from shared.engine.planning.vision_tensors import vision_tensors
from shared.errors import CheckpointError
from shared.kv_layout import LatentKv
from tests.support.engine.families import FAMILIES
from tests.support.engine.steps import Blocks, prefill

PROMPT = torch.randint(3, 199, (60,), generator=torch.Generator().manual_seed(1)).tolist()
NOTICED = 1e-3  # of the logits, RMS: 200 times the tolerance


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("deepseek")
    FAMILIES["deepseek"].write(folder)
    return folder


def _logits(folder: Path) -> Tensor:
    executor = load_executor(folder, dtype="float32", kv_cache_bytes=1 << 20)
    return prefill(executor, Blocks(executor.num_blocks).line(PROMPT), len(PROMPT))


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> Tensor:
    return _logits(checkpoint)


def _without(form: CheckpointForm, name: str) -> CheckpointForm:
    return replace(form, paired=tuple(each for each in form.paired if name not in each[0]))


def _plain_rope(config: ModelConfig) -> ModelConfig:
    return replace(config, ropes=(replace(config.ropes[0], scaling=None),))


MUTATIONS: dict[str, Callable[[ModelConfig], ModelConfig]] = {
    "queries in pairs": lambda c: replace(c, checkpoint=_without(c.checkpoint, "q_proj")),
    "keys in pairs": lambda c: replace(c, checkpoint=_without(c.checkpoint, "kv_a_proj")),
    "m² of the softmax scale": lambda c: replace(c, attention_scale=c.head_dim**-0.5),
    "factor of cos and sin": lambda c: replace(
        c, ropes=(replace(c.ropes[0], attention_factor=1.0),)
    ),
    "frequencies of YaRN": _plain_rope,
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_logits_depend_on_each_peculiarity(
    checkpoint: Path, expected: Tensor, mutation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed = MUTATIONS[mutation](read_config(checkpoint))
    monkeypatch.setattr(cpu_executor, "read_config", lambda _: changed)
    _assert_noticed(_logits(checkpoint), expected)


def test_logits_depend_on_the_eps_of_latent_norms(
    checkpoint: Path, expected: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is 1e-6, although the config says 1e-2."""
    monkeypatch.setattr(latent_attention, "NORM_EPS", 1e-2)
    _assert_noticed(_logits(checkpoint), expected)


def _assert_noticed(changed: Tensor, expected: Tensor) -> None:
    error = (changed - expected).pow(2).mean().sqrt() / expected.pow(2).mean().sqrt()
    assert error > NOTICED


def test_a_token_has_one_row_of_latents(checkpoint: Path) -> None:
    executor = load_executor(checkpoint, dtype="float32", kv_cache_bytes=1 << 20)
    assert executor.kv_layout.state == LatentKv(20, 8, "float32")
    assert executor.kv_layout.bytes_per_token == 3 * (20 + 8) * 4
    assert executor.kv_layout.key == "float32/b16/l3/latent20+8"


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"qk_rope_head_dim": 7}, "qk_rope_head_dim 7 is odd"),
        ({"num_key_value_heads": 1}, "num_key_value_heads 1 is not num_attention_heads 3"),
        ({"kv_lora_rank": 0}, r"Expected `int` >= 1 - at `\$.kv_lora_rank`"),
        ({"rope_parameters": {"rope_type": "odd"}}, "rope type 'odd' is not supported"),
        ({"v_head_dim": 11}, r"kv_b_proj.weight has shape \[66, 20\], the config requires \[69,"),
    ],
)
def test_a_bad_config_is_one_line(
    checkpoint: Path, tmp_path: Path, fields: dict[str, Any], error: str
) -> None:
    given = json.loads((checkpoint / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**given, **fields}))
    (tmp_path / "model.safetensors").symlink_to(checkpoint / "model.safetensors")
    with pytest.raises(CheckpointError, match=error) as raised:
        load_executor(tmp_path, dtype="float32", kv_cache_bytes=1 << 20)
    assert "\n" not in raised.value.message


def test_tensors_that_are_not_used_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    FAMILIES["kimi, text"].write(tmp_path)
    load_executor(tmp_path, dtype="float32", kv_cache_bytes=1 << 20)
    line = next(each for each in capsys.readouterr().out.splitlines() if "not_used" in each)
    vision = read_config(tmp_path).vision
    assert vision is not None
    assert f"count={1 + len(vision_tensors(vision))} " in line  # its encoder is loaded elsewhere
    assert "first=language_model.model.layers.3.eh_proj.weight" in line
