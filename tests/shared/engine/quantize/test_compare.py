"""KL divergence and agreement of models, over the positions of prompts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from shared.engine.executors.local_executor import LocalExecutor
from shared.engine.quantize.compare import (
    CHUNK_TOKENS,
    PromptQuality,
    compare,
    prompt_logits,
    summary,
)
from shared.engine.quantize.variants import JUDGED, ORIGINAL, PLAIN, Comparisons
from shared.errors import CheckpointError, ConfigError
from tests.support.engine.checkpoints import write_llama, write_model
from tests.support.engine.quantized import edit_tensors, quantize
from tests.support.engine.steps import Blocks, prefill

PROMPTS = [[(7 * n + k) % 190 + 3 for n in range(count)] for k, count in enumerate((1, 20, 150))]
SHAPE = {"hidden_size": 64, "head_dim": 32, "intermediate_size": 128}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    write_llama(folder, **SHAPE)
    return folder


@pytest.fixture(scope="module")
def executors(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, LocalExecutor]]:
    """Of an INT4 copy and its original."""
    copy = quantize(folder, tmp_path_factory.mktemp("copies") / "int4", "int4", group=32)
    comparisons = Comparisons.of(copy, folder, "fp8")
    assert [*comparisons.pairs.values()] == [
        (PLAIN, JUDGED),
        (ORIGINAL, PLAIN),
        (ORIGINAL, JUDGED),
    ]
    with comparisons.loaded(150, device="cpu", load_format="auto") as executors:
        yield executors


@pytest.mark.long
def test_logits_of_chunks_are_those_of_one_step(executors: dict[str, LocalExecutor]) -> None:
    executor = executors[JUDGED]
    parts = [*prompt_logits(executor, PROMPTS[2])]
    assert [len(each) for each in parts] == [CHUNK_TOKENS, CHUNK_TOKENS, 22]
    line = Blocks(executor.num_blocks).line(PROMPTS[2])
    assert torch.equal(torch.cat(parts), prefill(executor, line, 150))


@pytest.mark.long
def test_divergence_is_that_of_the_formula(executors: dict[str, LocalExecutor]) -> None:
    [found, own] = compare(executors, [(ORIGINAL, JUDGED), (PLAIN, PLAIN)], PROMPTS)
    for prompt, result, same in zip(PROMPTS, found, own, strict=True):
        p, q = (
            torch.cat([*prompt_logits(executors[name], prompt)]).double().softmax(-1)
            for name in (ORIGINAL, JUDGED)
        )
        expected = (p * (p / q).log()).sum(-1)
        torch.testing.assert_close(torch.tensor(result.kl), expected.float(), rtol=1e-4, atol=1e-7)
        assert result.agrees == (p.argmax(-1) == q.argmax(-1)).tolist()
        assert same.kl == [0.0] * len(prompt)
        assert all(same.agrees)


@pytest.mark.long
def test_fp8_kv_diverges_less_than_int4_weights(executors: dict[str, LocalExecutor]) -> None:
    kv, weights = (
        summary(each) for each in compare(executors, [(PLAIN, JUDGED), (ORIGINAL, PLAIN)], PROMPTS)
    )
    assert 0 < kv.kl_mean < weights.kl_mean
    assert 0 < weights.top1_agreement < kv.top1_agreement <= 1


def test_summary_is_over_positions_and_names_the_worst_prompt() -> None:
    prompts = [
        PromptQuality([0.0] * 96, [True] * 96),
        PromptQuality([1.0, 3.0], [True, False]),
        PromptQuality([5.0, 0.0], [True, True]),
    ]
    found = summary(prompts)
    assert (found.num_tokens, found.kl_max, found.worst, found.worst_kl) == (100, 5.0, 2, 2.5)
    assert (found.kl_mean, found.top1_agreement) == (0.09, 0.99)
    assert 3.0 <= found.kl_p99 <= 5.0


def test_groups_of_layers_have_their_own_blocks(tmp_path: Path) -> None:
    """Windows are shorter than the prompt."""
    fields = {"sliding_window": 40, "sliding_window_pattern": 2, "num_hidden_layers": 4}
    write_model(tmp_path, "Gemma3ForCausalLM", **SHAPE, **fields)
    comparisons = Comparisons.of(tmp_path, None, "fp8")
    with comparisons.loaded(150, device="cpu", load_format="auto") as executors:
        [found] = compare(executors, [*comparisons.pairs.values()], PROMPTS)
        line = Blocks(executors[JUDGED].num_blocks).line(PROMPTS[2])
        expected = prefill(executors[JUDGED], line, 150)
        assert torch.equal(torch.cat([*prompt_logits(executors[JUDGED], PROMPTS[2])]), expected)
    assert 0 < summary(found).kl_mean < 1


def test_logits_that_are_no_numbers_are_an_error(folder: Path, tmp_path: Path) -> None:
    for each in folder.iterdir():
        (tmp_path / each.name).write_bytes(each.read_bytes())
    edit_tensors(tmp_path, lambda given: given["model.norm.weight"].fill_(torch.nan))
    comparisons = Comparisons.of(tmp_path, None, "fp8")
    with (
        comparisons.loaded(150, device="cpu", load_format="auto") as executors,
        pytest.raises(CheckpointError, match="plain: logits of prompt 1 are NaN"),
    ):
        compare(executors, [*comparisons.pairs.values()], PROMPTS)


def test_models_of_other_vocabularies_are_an_error(folder: Path, tmp_path: Path) -> None:
    write_llama(tmp_path, **SHAPE, vocab_size=200)
    comparisons = Comparisons.of(folder, tmp_path, "bf16")
    with (
        pytest.raises(ConfigError, match="vocabularies differ"),
        comparisons.loaded(9, device="cpu", load_format="auto"),
    ):
        pass
    with pytest.raises(ConfigError, match="nothing to compare: give --kv-dtype fp8, or --against"):
        Comparisons.of(folder, None, "bf16")
