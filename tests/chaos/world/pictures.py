"""Requests that show pictures: of five tiles each, half of them shown by two requests."""

from __future__ import annotations

from pathlib import Path

from tests.chaos.world.workload import NUM_STREAMS, Body, sampling_of
from tests.support.cluster.vision_cluster import STEADY, content, picture
from tests.support.services.seeing_dir import write_seeing_dir

MODEL_NAME = "smolvlm-tiny"
SCALE = 4  # of its encoder: 16 tokens a tile
SIZE = (400, 100)  # four tiles and one of all of it: a third of a second of CPU


def write_seeing_model(folder: Path) -> tuple[Path, str]:
    """Returns the folder and the name of a small random model that takes images."""
    return write_seeing_dir(folder / MODEL_NAME, STEADY, SCALE), MODEL_NAME


def picture_requests(count: int = NUM_STREAMS) -> list[tuple[str, Body]]:
    """(path, body); the same in every run."""
    return [("/v1/chat/completions", _body(index)) for index in range(count)]


def _body(index: int) -> Body:
    own, shared = picture(index, SIZE), picture(1000 + index // 4, SIZE)
    shown = {0: (own,), 1: (shared,), 2: (shared, own), 3: (own,)}[index % 4]
    # no text before the pictures, which all prompts would share: they would go to one worker
    asked = content(*shown, f"Question {index}: what is this? Say it in many words.")
    return {
        "model": MODEL_NAME,
        "messages": [{"role": "user", "content": asked}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
        "max_tokens": 150,
        "temperature": 0,
    } | sampling_of(index, is_chat=True)
