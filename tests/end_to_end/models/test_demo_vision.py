"""The demo model that sees, through split workers: pictures that its training has not drawn."""

from __future__ import annotations

import base64
import io
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from PIL import Image

from demo_vision_training.questions import HELD_OUT, KINDS, Case, case
from services.cli.cluster.service_options import DEMO_VISION_DIR
from tests.support.cluster.model_cluster import ModelCluster, run_model

NUM_CASES = 100
MIN_RIGHT = 0.95
WORKERS = ("prefill-1", "decode-1")


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


def answer_to(cluster: ModelCluster, asked: Case) -> str:
    text = {"type": "text", "text": asked.question}
    content = [*map(part_of, asked.images), text]
    found = cluster.complete(content, temperature=0, max_tokens=16)
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
