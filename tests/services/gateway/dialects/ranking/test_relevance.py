"""The score of a reranker, from the engine's own sampler: the softmax of the two logits."""

from __future__ import annotations

import json

import pytest
import torch

from services.gateway.dialects.ranking.pairs import judging
from services.gateway.dialects.ranking.scores import relevance
from services.gateway.output.results import ChoiceResult
from services.gateway.text.model_files import ModelFiles, RankingTokens
from shared.engine.sampling.sampler import sample_tokens
from shared.errors import HearthError
from tests.services.gateway.peer import CARD
from tests.shared.engine.sampling.test_sampler import PROMPT, sampling_of
from tests.support.engine.rig import new_sequence
from tests.support.services.model_dir import write_model_dir

TOKENS = RankingTokens(yes=7, no=350)
# Defaults of a model that would change the distribution.
DEFAULTS = {"temperature": 0.5, "top_k": 1, "top_p": 0.1, "repetition_penalty": 1.4}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    folder = write_model_dir(tmp_path_factory.mktemp("reranker"))
    (folder / "generation_config.json").write_text(json.dumps(DEFAULTS))
    return ModelFiles(folder)


@pytest.mark.parametrize("scale", [0.1, 3.0, 12.0])
@pytest.mark.parametrize("offset", [0.0, -30.0])  # the latter: neither is a likely token
def test_relevance_is_the_softmax_of_two_logits(
    files: ModelFiles, scale: float, offset: float
) -> None:
    params = judging(TOKENS).resolve(
        max_tokens=1,
        num_logprobs=2,
        num_prompt_logprobs=None,
        default_seed=1,
        card=CARD,
        files=files,
    )
    generator = torch.Generator().manual_seed(5)
    for _ in range(20):
        logits = torch.randn(1, CARD.vocab_size, generator=generator) * scale
        logits[0, list(TOKENS)] += offset
        expected = float(logits[0, list(TOKENS)].softmax(0)[0])
        inputs = sampling_of(new_sequence(PROMPT, params))
        (token_id,), (logprobs,) = sample_tokens(logits, inputs)
        assert token_id in TOKENS and logprobs is not None
        choice = ChoiceResult(0)
        choice.tokens.append(token_id, logprobs, 0)
        assert relevance(choice, TOKENS) == pytest.approx(expected, abs=1e-3)


def test_answer_without_logprobs_has_no_score() -> None:
    with pytest.raises(HearthError, match="no logprobs"):
        relevance(ChoiceResult(0), TOKENS)
