"""The demo model that sees, through split workers: pictures that its training has not drawn."""

from __future__ import annotations

import base64
import io
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from PIL import Image

from demo_vision_training.questions import HELD_OUT, KINDS, Case, case
from services.cli.cluster.service_options import DEMO_VISION_DIR
from tests.support.cluster.model_cluster import ModelCluster, run_model
from tests.support.cluster.vision_cluster import decoding

NUM_CASES = 100
MIN_RIGHT = 0.95
WORKERS = ("prefill-1", "decode-1", "decode-2")
MANY_TOKENS = {"max_tokens": 1000, "logit_bias": {"2": -100}, "logprobs": True}  # no end before
RESUBMISSIONS = "hearth_gateway_resubmissions_total"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelCluster]:
    folder = tmp_path_factory.mktemp("demo-vision")
    options = {"kv-cache-bytes": str(64 << 20)}
    with run_model(folder, DEMO_VISION_DIR, WORKERS, options) as running:
        yield running


def part_of(image: Image.Image) -> dict:
    file = io.BytesIO()
    image.save(file, "PNG")
    data = base64.b64encode(file.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}


def content_of(asked: Case) -> list[dict]:
    return [*map(part_of, asked.images), {"type": "text", "text": asked.question}]


def answer_to(cluster: ModelCluster, asked: Case) -> str:
    found = cluster.complete(content_of(asked), temperature=0, max_tokens=16)
    return found["choices"][0]["message"]["content"].strip()


def test_held_out_pictures_are_answered_right(cluster: ModelCluster) -> None:
    cases = [case(number) for number in range(HELD_OUT, HELD_OUT + NUM_CASES)]
    assert {each.kind for each in cases} == KINDS.keys()  # two pictures in a prompt among them
    answers = [answer_to(cluster, cases[0])]  # processes start: others would wait too long
    with ThreadPoolExecutor(2) as threads:
        answers += threads.map(lambda each: answer_to(cluster, each), cases[1:])
    wrong = Counter(
        each.kind for each, answer in zip(cases, answers, strict=True) if answer != each.answer
    )
    assert wrong.total() <= NUM_CASES * (1 - MIN_RIGHT), dict(wrong)


def tokens_of(answers: Iterable[dict]) -> list[str]:
    """Returns the tokens of an answer, or of chunks of one."""
    choices = [each for answer in answers for each in answer["choices"] if each["logprobs"]]
    return [each["token"] for choice in choices for each in choice["logprobs"]["content"]]


def num_resubmissions(cluster: ModelCluster) -> float:
    operator = {"authorization": f"Bearer {cluster.state.operator_token}"}
    lines = cluster.client.get("/metrics", headers=operator).text.splitlines()
    return sum(float(each.split()[1]) for each in lines if each.startswith(RESUBMISSIONS))


@pytest.mark.long
def test_an_answer_about_two_pictures_survives_its_worker(cluster: ModelCluster) -> None:
    """The last test: one of two workers is lost."""
    asked = case(HELD_OUT, "two pictures")
    content, before = content_of(asked), num_resubmissions(cluster)
    stream = cluster.stream(content, **MANY_TOKENS)
    tokens = tokens_of(next(stream) for _ in range(8))
    cluster.kill(decoding(cluster))
    tokens += tokens_of(stream)
    assert num_resubmissions(cluster) > before
    assert "".join(tokens).strip().startswith(asked.answer)
    alone = cluster.complete(content, **MANY_TOKENS, cache_salt="other")
    assert alone["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert tokens_of([alone]) == tokens
