"""A small random Kimi K2.5 as the Hub has it: latents, experts of four bits, the text of a
multimodal model. What clients rely on with dense models holds for it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager

import pytest
import torch

from tests.end_to_end.test_chat import text_of
from tests.services.cli.cluster.chat_checkpoint import TEMPLATE, write_byte_tokenizer
from tests.shared.engine.model_config.test_quantization_config import KIMI_IGNORED
from tests.support.cluster.model_cluster import ModelCluster, RenewedCluster, run_model
from tests.support.engine.families import DEEPSEEK, KimiText
from tests.support.engine.quantized import quantize

pytestmark = pytest.mark.long  # in the short run clusters of dense models, of gpt-oss and Scout
QUESTION = "Which experts does a token reach?"
WORKERS = ("worker-1", "worker-2")
SCHEMA = {
    "type": "object",
    "properties": {
        "expert": {"type": "integer", "minimum": 0, "maximum": 7},
        "name": {"enum": ["gate", "up", "down"]},
    },
    "required": ["expert", "name"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def renewed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RenewedCluster]:
    folder = tmp_path_factory.mktemp("kimi")
    vocab_size = write_byte_tokenizer(folder / "tokenizer", TEMPLATE)
    family = KimiText("KimiK25ForConditionalGeneration", {**DEEPSEEK, "vocab_size": vocab_size})
    family.write(folder / "plain", dtype=torch.bfloat16)
    quantize(folder / "plain", folder / "int4", "int4", group=0, ignored=KIMI_IGNORED)
    shutil.copytree(folder / "tokenizer", folder / "int4", dirs_exist_ok=True)

    def start() -> AbstractContextManager[ModelCluster]:
        return run_model(tmp_path_factory.mktemp("cluster"), folder / "int4", WORKERS)

    with RenewedCluster(start) as found:
        yield found


@pytest.fixture
def cluster(renewed: RenewedCluster) -> ModelCluster:
    return renewed.cluster()


def test_answers_follow_a_schema(cluster: ModelCluster) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": SCHEMA}}
    for seed in range(2):
        options = {"temperature": 1, "seed": seed, "max_tokens": 80}
        answer = cluster.complete(QUESTION, response_format=form, **options)
        value = json.loads(answer["choices"][0]["message"]["content"])
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert set(value) == {"expert", "name"}
        assert value["expert"] in range(8)


def test_latents_of_a_prompt_are_pushed_and_then_found_again(cluster: ModelCluster) -> None:
    question = "x" * 100
    first, second = (cluster.complete(question, max_tokens=8) for _ in range(2))
    workers = {first["hearth"]["prefill_worker"], first["hearth"]["decode_worker"]}
    assert workers == {*WORKERS}
    assert first["hearth"]["num_pushed_tokens"] == first["usage"]["prompt_tokens"] - 1
    assert first["choices"] == second["choices"]
    cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached == second["usage"]["prompt_tokens"] // 16 * 16


def test_stream_survives_its_decode_workers_death(cluster: ModelCluster) -> None:
    options = {"max_tokens": 150, "ignore_eos": True, "temperature": 1, "seed": 3}
    expected = list(cluster.stream(QUESTION, **options))
    stream = cluster.stream(QUESTION, **options)
    chunks = [next(stream) for _ in range(10)]
    newest = cluster.wait_for_heartbeats(
        lambda h: any(each.load and each.load.num_running for each in h.values())
    )
    victim = next(p for p, each in newest.items() if each.load and each.load.num_running)
    cluster.kill(victim)
    chunks += list(stream)
    assert text_of(chunks) == text_of(expected)
    assert chunks[-1]["hearth"]["decode_worker"] != victim
    assert chunks[-1]["hearth"]["num_resubmissions"] >= 1
