"""Small random checkpoints of odd sizes through a cluster of split roles: gpt-oss, and families in
AWQ, GPTQ, FP8, MXFP4 and compressed-tensors, also layers of several formats in one. The tokens are
those of transformers with the dequantized weights, alone and eight at a time, computed and found in
the cache.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import pytest
import torch

from tests.services.cli.cluster.chat_checkpoint import TEMPLATE, write_byte_tokenizer
from tests.support.cluster.greedy_texts import GreedyTexts, check_greedy_texts, greedy_texts
from tests.support.cluster.model_cluster import ModelCluster, run_model
from tests.support.engine.families import FAMILIES, one_tensor_each, stack_experts
from tests.support.engine.quantized import dequantize_folder, edit_tensors, quantize
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
MOE = {"moe_intermediate_size": 64}


class Case(NamedTuple):
    """`format_of`: a layer's name -> its format; "mxfp4": of all experts; None: a dense checkpoint.
    `config`: fields of quantization_config; `sizes`: of the model.
    """

    format_of: Callable[[str], StoredFormat | None] | Literal["mxfp4"] | None
    config: Mapping[str, Any] = MappingProxyType({})
    family: str = "llama, yarn"
    sizes: Mapping[str, Any] = MappingProxyType(MODEL)
    has_linear_experts: bool = False  # of Llama 4, whose own are one tensor

    def write(self, folder: Path, vocab_size: int) -> tuple[Path, Path]:
        """Returns the checkpoint and the dense one of the same numbers."""
        plain, stored, dense = (folder / each for each in ("plain", "stored", "dense"))
        FAMILIES[self.family].write(plain, vocab_size=vocab_size, **self.sizes)
        if self.format_of is None:
            return plain, plain
        if self.format_of == "mxfp4":
            quantize(plain, stored, "mxfp4")
            return stored, dequantize_folder(stored, dense, torch.float32)
        if self.has_linear_experts:
            edit_tensors(plain, one_tensor_each)
        write_formats(plain, stored, self.format_of, torch.float32, **self.config)
        if self.has_linear_experts:
            edit_tensors(stored.with_name("stored-dense"), stack_experts)
        return stored, stored.with_name("stored-dense")


def _mixed_gptq(layer: str) -> StoredFormat | None:
    """Layer 0 is dense, `down_proj` has eight bits, all else an order of columns."""
    if ".layers.0." in layer:
        return None
    if layer.endswith("down_proj"):
        return gptq(32, num_bits=8, is_symmetric=False)
    return gptq(32, is_ordered=True, is_symmetric=False)


def _experts_alone(layer: str) -> StoredFormat | None:
    is_expert = ".experts." in layer
    return packed(0, num_bits=4, scale_dtype=torch.float32) if is_expert else None


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
    "gpt-oss, mxfp4": Case("mxfp4", family="gpt-oss"),
    "gpt-oss": Case(None, family="gpt-oss", sizes={}),
    "gpt-oss, listed layers": Case(
        None, family="gpt-oss, listed layers, no biases, truncated", sizes={}
    ),
    "mixtral, awq": Case(lambda _: awq(), family="mixtral"),
    "gemma3, awq a row": Case(lambda _: awq(0), family="gemma3"),
    "qwen3 moe, gptq": Case(lambda _: gptq(), family="qwen3 moe", sizes={**MODEL, **MOE}),
    "phi3, gptq v2, zeros": Case(lambda _: gptq(0, version=2, is_symmetric=False), family="phi3"),
    "qwen2, int8 packed, zeros": Case(
        lambda _: packed(is_symmetric=False, scale_dtype=torch.float32), family="qwen2"
    ),
    "glm4 moe, int8": Case(
        lambda _: int8(scale_dtype=torch.float32), family="glm4 moe", sizes={**MODEL, **MOE}
    ),
    "llama4, int8 but experts": Case(
        lambda _: int8(scale_dtype=torch.float32),
        {"ignore": ["lm_head", r"re:.*\.experts\..*"]},
        family="llama4, experts",
        sizes={},
    ),
    "llama4, int4 of experts": Case(
        _experts_alone,
        {
            "ignore": [
                *("lm_head", "re:.*self_attn", "Llama4TextAttention"),
                r"re:.*feed_forward\.(router|shared_expert\..*)",
            ]
        },
        family="llama4, experts",
        sizes={},
        has_linear_experts=True,
    ),
    "deepseek, fp8": Case(lambda _: fp8(), family="deepseek", sizes={}),
    "deepseek, fp8 per tensor": Case(
        lambda _: fp8("fp8", is_per_tensor=True), family="deepseek", sizes={}
    ),
}


Served = tuple[ModelCluster, GreedyTexts]


@pytest.fixture(scope="module", params=in_short_run([], CASES))
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    folder, case = tmp_path_factory.mktemp("model"), CASES[request.param]
    vocab_size = write_byte_tokenizer(folder / "tokenizer", TEMPLATE)
    stored, dense = case.write(folder, vocab_size)
    shutil.copytree(folder / "tokenizer", stored, dirs_exist_ok=True)
    wanted = greedy_texts(dense, folder / "tokenizer/tokenizer.json", vocab_size)
    state = tmp_path_factory.mktemp("cluster")
    with run_model(state, stored, WORKERS, {"dtype": "float32"}) as cluster:
        yield cluster, wanted


def test_tokens_are_those_of_transformers(served: Served) -> None:
    check_greedy_texts(*served)
