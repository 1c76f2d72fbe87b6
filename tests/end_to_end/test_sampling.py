"""Sampling options of real workers over HTTP, through OpenAI's SDK where it has the field."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from tokenizers import Tokenizer

from services.cli.cluster.service_options import DEMO_MODEL_DIR
from shared.engine.models.checkpoint_config import read_config
from tests.support.cluster.hearth_up import Cluster

QUESTION = "What is the KV cache?"


@pytest.fixture(scope="module", autouse=True)
def all_blocks_are_freed(cluster: Cluster) -> Iterator[None]:
    yield
    cluster.wait_until_empty()


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(DEMO_MODEL_DIR / "tokenizer.json"))


def chat(cluster: Cluster, **options: Any) -> str:
    answer = cluster.sdk.chat.completions.create(
        model=cluster.model,
        messages=[{"role": "user", "content": QUESTION}],
        **{"temperature": 0, "max_tokens": 40, **options},
    )
    return answer.choices[0].message.content or ""


def complete(cluster: Cluster, prompt: Any = QUESTION, **options: Any) -> Any:
    return cluster.sdk.completions.create(model=cluster.model, prompt=prompt, **options)


# ── best_of ──────────────────────────────────────────────────────────────────────────────────────


def test_best_of_returns_choices_of_highest_mean_logprob(cluster):
    options = {"temperature": 1.5, "seed": 6, "max_tokens": 12, "extra_body": {"min_tokens": 1}}
    sampled = complete(cluster, n=4, logprobs=0, **options).choices
    ranked = sorted(sampled, key=lambda each: -mean(each.logprobs.token_logprobs))
    best = complete(cluster, n=2, best_of=4, **options)
    assert [each.text for each in best.choices] == [each.text for each in ranked[:2]]
    assert [each.index for each in best.choices] == [0, 1]
    assert best.usage.completion_tokens == sum(len(each.logprobs.tokens) for each in sampled)
    assert ranked[0].text != sampled[0].text, "the first sampled choice must not be the best"


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def test_best_of_ranks_each_prompt_separately(cluster):
    options = {"temperature": 1.5, "seed": 5, "max_tokens": 12, "best_of": 3}
    prompts = [QUESTION, "What is decode?"]
    together = complete(cluster, prompts, **options)
    alone = [complete(cluster, prompt, **options).choices[0].text for prompt in prompts]
    assert [each.text for each in together.choices] == alone


# ── bias and bans ────────────────────────────────────────────────────────────────────────────────


def test_bias_of_100_forces_and_minus_100_bans_a_token(cluster, tokenizer):
    baseline = chat(cluster)
    first = tokenizer.encode(baseline, add_special_tokens=False).ids[0]
    banned = chat(cluster, logit_bias={str(first): -100})
    assert tokenizer.encode(banned, add_special_tokens=False).ids[0] != first
    assert (
        chat(cluster, logit_bias={str(first): 100}, max_tokens=5) == tokenizer.decode([first]) * 5
    )
    assert chat(cluster, logit_bias={str(first): 0}) == baseline


def test_bias_beyond_the_vocabulary_is_rejected(cluster):
    size = read_config(DEMO_MODEL_DIR).vocab_size
    with pytest.raises(openai.BadRequestError) as raised:
        chat(cluster, logit_bias={str(size): 1})
    assert raised.value.param == "logit_bias"


def test_bad_words_are_not_generated(cluster):
    baseline = chat(cluster)
    words = baseline.split()[1:4]
    without = chat(cluster, extra_body={"bad_words": words})
    assert without and without != baseline
    assert not set(words) & set(without.split())
    assert chat(cluster, extra_body={"bad_words": []}) == baseline


# ── penalties ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "penalty",
    [
        {"frequency_penalty": 2},
        {"presence_penalty": 2},
        {"extra_body": {"repetition_penalty": 1.5}},
    ],
    ids=["frequency", "presence", "repetition"],
)
def test_penalty_makes_a_long_answer_more_varied(cluster, tokenizer, num_usual, penalty):
    assert num_distinct(cluster, tokenizer, **penalty) > num_usual


@pytest.fixture(scope="module")
def num_usual(cluster: Cluster, tokenizer: Tokenizer) -> int:
    """Distinct tokens without a penalty."""
    return num_distinct(cluster, tokenizer)


def num_distinct(cluster: Cluster, tokenizer: Tokenizer, **options: Any) -> int:
    extra = {"ignore_eos": True, **options.pop("extra_body", {})}
    text = chat(cluster, max_tokens=60, extra_body=extra, **options)
    return len(set(tokenizer.encode(text, add_special_tokens=False).ids))


def test_zero_penalties_are_off_and_streams_apply_penalties(cluster):
    none = {"frequency_penalty": 0, "presence_penalty": 0, "extra_body": {"repetition_penalty": 1}}
    assert chat(cluster, **none) == chat(cluster)
    long_answer = {"max_tokens": 50, "seed": 3, "extra_body": {"ignore_eos": True}}
    options = {"frequency_penalty": 1.5, "temperature": 1, **long_answer}
    full = chat(cluster, **options)
    assert full != chat(cluster, temperature=1, **long_answer)
    chunks = cluster.sdk.chat.completions.create(
        model=cluster.model,
        messages=[{"role": "user", "content": QUESTION}],
        stream=True,
        **options,
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == full


# ── lists ────────────────────────────────────────────────────────────────────────────────────────


def test_prompt_list_equals_single_prompt_requests(cluster):
    prompts = [QUESTION, "What is decode?"]
    options = {"n": 2, "temperature": 1, "seed": 3, "max_tokens": 6, "echo": True, "logprobs": 1}
    together = complete(cluster, prompts, **options).choices
    assert [each.index for each in together] == [0, 1, 2, 3]
    alone = [each for prompt in prompts for each in complete(cluster, prompt, **options).choices]
    assert [each.text for each in together] == [each.text for each in alone]
    assert [each.logprobs for each in together] == [each.logprobs for each in alone]


def test_one_invalid_prompt_rejects_the_list(cluster):
    with pytest.raises(openai.BadRequestError) as raised:
        complete(cluster, [QUESTION] * 9 + [""], max_tokens=4000)
    assert raised.value.param == "prompt[9]"


def test_client_disconnect_cancels_all_prompts_of_a_list(cluster):
    long_answer = {"max_tokens": 4000, "extra_body": {"ignore_eos": True}}
    stream = complete(cluster, [QUESTION] * 3, n=2, stream=True, **long_answer)
    assert next(stream).choices
    stream.close()
    cluster.wait_until_empty()


def test_echo_without_output_returns_prompt_logprobs(cluster):
    (alone,) = complete(cluster, max_tokens=0, echo=True, logprobs=2).choices
    assert (alone.text, alone.finish_reason) == (QUESTION, "length")
    (more,) = complete(cluster, max_tokens=3, echo=True, logprobs=2, temperature=0).choices
    num_prompt_tokens = len(alone.logprobs.tokens)
    assert more.logprobs.token_logprobs[:num_prompt_tokens] == alone.logprobs.token_logprobs
    assert "".join(alone.logprobs.tokens) == QUESTION
