"""Greedy texts of a cluster of split roles beside those of transformers."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from tests.support.cluster.model_cluster import ModelCluster
from tests.support.engine.reference import MARGIN, ROUTER_MARGIN, continuation, router_gaps

NUM_PROMPTS, PROMPT_TOKENS, NUM_SAMPLED = 8, 37, 10


class GreedyTexts(NamedTuple):
    """Prompts whose greedy tokens no rounding changes, and the texts of these tokens."""

    prompts: list[list[int]]
    expected: list[str]


def greedy_texts(dense: Path, tokenizer: Path, vocab_size: int) -> GreedyTexts:
    """Returns texts of transformers. A prompt ends with a whole character: of a part, the answer
    would have the rest.
    """
    model = AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32).eval()
    decoder = Tokenizer.from_file(str(tokenizer))
    last = decoder.token_to_id("a")
    found = GreedyTexts([], [])
    for seed in range(10 * NUM_PROMPTS):
        generator = torch.Generator().manual_seed(seed)
        prompt = torch.randint(3, vocab_size, (PROMPT_TOKENS,), generator=generator).tolist()
        prompt[-1] = last
        with router_gaps(model) as gaps:
            tokens, margin = continuation(model, prompt, NUM_SAMPLED)
        if margin > MARGIN and min(gaps, default=1.0) > ROUTER_MARGIN:
            found.prompts.append(prompt)
            found.expected.append(decoder.decode(tokens))
        if len(found.prompts) == NUM_PROMPTS:
            return found
    raise AssertionError("too few prompts with a margin")


def check_greedy_texts(cluster: ModelCluster, wanted: GreedyTexts) -> None:
    """Sends one prompt alone; it and seven others at once, of which it is cached; then all, cached.

    Raises AssertionError for another text, and for an answer of one worker.
    """

    def complete(prompt: list[int]) -> tuple[str, int]:
        """Returns the text and the number of cached tokens."""
        body = {
            "model": cluster.model,
            "prompt": prompt,
            "max_tokens": NUM_SAMPLED,
            "temperature": 0,
            "ignore_eos": True,
        }
        response = cluster.client.post("/v1/completions", json=body)
        assert response.status_code == 200, response.text
        answer = response.json()
        assert answer["hearth"]["prefill_worker"] != answer["hearth"]["decode_worker"]
        cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        return answer["choices"][0]["text"], cached

    assert complete(wanted.prompts[0]) == (wanted.expected[0], 0)
    with ThreadPoolExecutor(NUM_PROMPTS) as clients:
        for num_cached in (1, NUM_PROMPTS):
            found = list(clients.map(complete, wanted.prompts))
            assert [text for text, _ in found] == wanted.expected
            assert sum(cached > 0 for _, cached in found) == num_cached
