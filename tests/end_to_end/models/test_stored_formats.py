"""Small random checkpoints of AWQ, GPTQ, FP8 and compressed-tensors, layers of several formats in
one, through a cluster of split roles: the tokens are those of transformers with the dequantized
weights, alone and eight at a time, computed and found in the cache.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from tests.services.cli.cluster.chat_checkpoint import TEMPLATE, write_byte_tokenizer
from tests.support.cluster.model_cluster import ModelCluster, run_model
from tests.support.engine.checkpoints import write_model
from tests.support.engine.reference import MARGIN, continuation
from tests.support.engine.stored_formats import (
    StoredFormat,
    awq,
    fp8,
    gptq,
    int8,
    packed,
    write_formats,
)
from tests.support.grids import in_short_run

WORKERS = ("worker-1", "worker-2")
NUM_PROMPTS, PROMPT_TOKENS, NUM_SAMPLED = 8, 37, 10
# Heads of 24 and 5 steps of 32 columns: partial blocks, and groups that are no power of two.
MODEL: dict[str, Any] = {
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}


class Case(NamedTuple):
    format_of: Callable[[str], StoredFormat | None]
    config: Mapping[str, Any] = MappingProxyType({})


def _mixed_gptq(layer: str) -> StoredFormat | None:
    """Layer 0 is dense, `down_proj` has eight bits, all else an order of columns."""
    if ".layers.0." in layer:
        return None
    if layer.endswith("down_proj"):
        return gptq(32, num_bits=8, is_symmetric=False)
    return gptq(32, is_ordered=True, is_symmetric=False)


def _mixed_compressed(layer: str) -> StoredFormat:
    if "self_attn" in layer:
        return packed(num_bits=8, scale_dtype=torch.float32)
    form = fp8 if layer.endswith("down_proj") else int8
    return form(scale_dtype=torch.float32)


def _group(form: StoredFormat, target: str) -> dict[str, Any]:
    (group,) = form.config["config_groups"].values()
    return {**group, "targets": [f"re:.*{target}.*"], "format": form.config["format"]}


CASES: dict[str, Case] = {
    "gptq": Case(
        _mixed_gptq,
        {
            **gptq(32, is_ordered=True, is_symmetric=False).config,
            "dynamic": {
                r"-:.*\.layers\.0\..*": {},
                r"+:.*down_proj": {"bits": 8, "desc_act": False},
            },
        },
    ),
    "awq": Case(lambda _: awq()),
    "compressed-tensors": Case(
        _mixed_compressed,
        {
            "config_groups": {
                "a": _group(packed(num_bits=8), "self_attn"),
                "b": _group(fp8(), "down_proj"),
                "c": _group(int8(), "mlp"),
            },
            "format": "mixed-precision",
        },
    ),
    "fp8": Case(lambda _: fp8("fp8", is_per_tensor=True, is_static=True)),
}


class Served(NamedTuple):
    cluster: ModelCluster
    prompts: list[list[int]]
    expected: list[str]

    def complete(self, prompt: list[int]) -> tuple[str, int]:
        """Returns the text and the number of cached tokens."""
        body = {
            "model": self.cluster.model,
            "prompt": prompt,
            "max_tokens": NUM_SAMPLED,
            "temperature": 0,
            "ignore_eos": True,
        }
        response = self.cluster.client.post("/v1/completions", json=body)
        assert response.status_code == 200, response.text
        answer = response.json()
        assert answer["hearth"]["prefill_worker"] != answer["hearth"]["decode_worker"]
        cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        return answer["choices"][0]["text"], cached


@pytest.fixture(scope="module", params=in_short_run(["gptq"], CASES))
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    folder, case = tmp_path_factory.mktemp("model"), CASES[request.param]
    vocab_size = write_byte_tokenizer(folder / "tokenizer", TEMPLATE)
    write_model(folder / "plain", "LlamaForCausalLM", vocab_size=vocab_size, **MODEL)
    stored, dense = write_formats(
        folder / "plain", folder / "stored", case.format_of, torch.float32, **case.config
    )
    shutil.copytree(folder / "tokenizer", stored, dirs_exist_ok=True)
    prompts, expected = references(dense, folder / "tokenizer/tokenizer.json", vocab_size)
    state = tmp_path_factory.mktemp("cluster")
    with run_model(state, stored, WORKERS, {"dtype": "float32"}) as cluster:
        yield Served(cluster, prompts, expected)


def references(dense: Path, tokenizer: Path, vocab_size: int) -> tuple[list[list[int]], list[str]]:
    """Returns prompts whose greedy tokens no rounding changes, and the texts of these tokens. A
    prompt ends with a whole character: of a part, the answer would have the rest.
    """
    model = AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32).eval()
    decoder = Tokenizer.from_file(str(tokenizer))
    last = decoder.token_to_id("a")
    prompts: list[list[int]] = []
    texts: list[str] = []
    for seed in range(10 * NUM_PROMPTS):
        generator = torch.Generator().manual_seed(seed)
        prompt = torch.randint(3, vocab_size, (PROMPT_TOKENS,), generator=generator).tolist()
        prompt[-1] = last
        tokens, margin = continuation(model, prompt, NUM_SAMPLED)
        if margin > MARGIN and len(prompts) < NUM_PROMPTS:
            prompts.append(prompt)
            texts.append(decoder.decode(tokens))
    assert len(prompts) == NUM_PROMPTS
    return prompts, texts


def test_tokens_are_those_of_transformers(served: Served) -> None:
    """One prompt alone; it and seven others at once, of which it is cached; then all cached."""
    first, expected = served.prompts[0], served.expected
    assert served.complete(first) == (expected[0], 0)
    with ThreadPoolExecutor(NUM_PROMPTS) as clients:
        for num_cached in (1, NUM_PROMPTS):
            found = list(clients.map(served.complete, served.prompts))
            assert [text for text, _ in found] == expected
            assert sum(cached > 0 for _, cached in found) == num_cached
