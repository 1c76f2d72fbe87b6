"""Grammars over the demo model's tokenizer, and outputs that they allow."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from random import Random

import numpy as np
from numpy.typing import NDArray

import shared
from shared.engine.token_masks.mask_threads import AwaitedJob, Job
from shared.grammar.matcher import Matcher
from shared.grammar.vocabulary import Vocabulary, load_vocabulary

MODEL_DIR = Path(shared.__file__).parent / "demo_model"
EOS: int = json.loads((MODEL_DIR / "config.json").read_text())["eos_token_id"]
# passes its first masks, then needs more lexer states than allowed; has no early end
HOSTILE_REGEX = "^(.{1,5000}){100,500}$"


@cache
def vocabulary(vocab_size: int = 2048, eos: int = EOS) -> Vocabulary:
    return load_vocabulary(MODEL_DIR, vocab_size=vocab_size, eos_token_ids=(eos,))


def compiled(kind: str, source: str) -> Matcher:
    return vocabulary().compile(kind, source)


def allowed(words: bytes | NDArray[np.int32]) -> list[int]:
    """The tokens of a mask, ascending."""
    return np.flatnonzero(np.unpackbits(np.frombuffer(words, np.uint8), bitorder="little")).tolist()


def encode(text: str) -> list[int]:
    return vocabulary().encode(text)


def walk(matcher: Matcher, random: Random, max_tokens: int = 500) -> list[int] | None:
    """An output that ends: of random allowed tokens. None: it has not ended by then."""
    token_ids: list[int] = []
    while len(token_ids) < max_tokens:
        token_id = random.choice(allowed(matcher.fill()))
        if token_id == EOS:
            return token_ids
        assert matcher.accept([token_id]) == 1
        token_ids.append(token_id)
    return None


class InlineThreads:
    """Runs jobs at once; `held` ones only with `release`."""

    def __init__(self) -> None:
        self.is_holding = False
        self.held: list[Job] = []
        self.watched: list[AwaitedJob] = []
        self.num_batches = 0
        self.num_slow = 0
        self.num_abandoned_threads = 0

    def submit(self, jobs: Sequence[Job]) -> None:
        self.num_batches += 1
        self._run(jobs)

    def submit_slow(self, job: Job) -> None:
        self.num_slow += 1
        self._run([job])

    def watch(self, job: AwaitedJob) -> None:
        self.watched.append(job)

    def close(self) -> None:
        pass

    def release(self) -> None:
        self.is_holding = False
        while self.held:
            self.held.pop(0).run()

    def _run(self, jobs: Sequence[Job]) -> None:
        if self.is_holding:
            self.held += jobs
        else:
            for job in jobs:
                job.run()
