"""Steps of every kind that a worker computes, drawn at random: nothing in them has an effect."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import Any

import msgspec
import numpy as np

from shared.engine.executors.loading.load_options import LoadOptions
from shared.engine.executors.loading.warm_up import MAX_TOP_LOGPROBS, AllTokens, idle_step
from shared.engine.step import (
    LogitBias,
    Penalties,
    PoolingInputs,
    PromptSuccessors,
    StepInputs,
    TokenMasks,
    sampling_rows,
)

CONTEXTS = (0, 0, 15, 16, 17, 63, 64, 65, 127, 128, 129, 500, 1023, 1024, 1025, 2049, 3000, 9000)
# Tokens and rows at which kernels change to others, and their neighbours.
CHUNKS = (2, 3, 15, 16, 17, 31, 33, 63, 64, 65, 100, 128, 129, 255, 256, 257, 512, 513, 1024, 1025)
ENTRIES = (1, 2, 15, 16, 300)  # of penalties and biases
COPIES = (1, 2, 8, 9, 64, 65, 200, 513)
FACTORS = {"temperature": 0.8, "top_p": 0.9, "min_p": 0.1, "top_k": 7}


@dataclass(frozen=True)
class Steps:
    """Draws steps for a worker with these options."""

    rng: Random
    options: LoadOptions
    num_groups: int
    vocab_size: int

    @property
    def max_rows(self) -> int:
        return min(self.options.max_sequences, self.options.max_batch_tokens)

    def draw(self, count: int) -> Iterator[StepInputs]:
        """Yields `count` steps, and one step of each kind."""
        kinds = (self.decodes, self.prompts, self.mixed, self.special, self.unsampled, self.copied)
        for kind in (*kinds, *self.rng.choices(kinds, k=count)):
            yield kind()

    def decodes(self, num_rows: int | None = None) -> StepInputs:
        num_rows = num_rows or self._rows()
        return self._drawn(self._idle([1] * num_rows))

    def prompts(self) -> StepInputs:
        """One, or several at once."""
        lens, room = [], self.options.max_batch_tokens
        while room > 1 and len(lens) < self.max_rows and (not lens or self.rng.random() < 0.4):
            lens.append(self._chunk(room))
            room -= lens[-1]
        return self._drawn(self._idle(lens or [1]))

    def mixed(self) -> StepInputs:
        """Decodes before a prompt: both kinds of attention have some rows."""
        room = self.options.max_batch_tokens
        if room < 3 or self.max_rows < 2:
            return self.prompts()
        chunk = self._chunk(room - 1)
        num_decodes = self.rng.randint(1, min(self.max_rows - 1, room - chunk))
        return self._drawn(self._idle([*[1] * num_decodes, chunk]))

    def special(self) -> StepInputs:
        """Rows whose logits something changes, and what is computed from hidden states."""
        step = self.rng.choice((self.decodes, self.prompts, self.mixed))()
        if self.rng.random() < 0.3:
            return msgspec.structs.replace(step, **self._of_prompt(step))
        fields = self._of_logits(step.sampling.num_rows)
        chosen = self.rng.sample(sorted(fields), self.rng.randint(1, len(fields)))
        return _sampled(step, **{name: fields[name] for name in chosen})

    def unsampled(self) -> StepInputs:
        """The chunk of a prompt that goes on."""
        step = self.prompts()
        none = np.empty(0, dtype=np.int64)
        return _sampled(step, logits_indices=none, rows=sampling_rows(0))

    def copied(self) -> StepInputs:
        copies = ((0, 1),) * self.rng.choice(COPIES)
        return msgspec.structs.replace(self.prompts(), block_copies=copies)

    def _rows(self) -> int:
        near = [each for each in CHUNKS if each <= self.max_rows]
        return self.rng.choice((*near, self.max_rows, self.rng.randint(1, self.max_rows)))

    def _chunk(self, most: int) -> int:
        near = [each for each in CHUNKS if each <= most]
        return self.rng.choice((*near, most, self.rng.randint(2, most)))

    def _idle(self, lens: list[int]) -> StepInputs:
        return idle_step(
            self.options.block_size,
            lens,
            context_tokens=self.rng.choice(CONTEXTS),
            num_groups=self.num_groups,
        )

    def _drawn(self, step: StepInputs) -> StepInputs:
        """Greedy or not."""
        names = self.rng.sample(sorted(FACTORS), self.rng.randint(0, len(FACTORS)))
        columns = {name: FACTORS[name] for name in names}
        return _sampled(step, rows=sampling_rows(len(step.query_lens), **columns))

    def _of_logits(self, num_rows: int) -> dict[str, Any]:
        count = self.rng.choice(ENTRIES)
        places = np.zeros(count, dtype=np.int64)
        values = np.ones(count, dtype=np.float32)
        masked = self.rng.randint(1, num_rows)
        top = {row: self.rng.randint(0, MAX_TOP_LOGPROBS) for row in range(num_rows)}
        return {
            "banned": [(0, 5)] * count,
            "bias": LogitBias(places, places, values),
            "masks": TokenMasks(np.arange(masked), (AllTokens(self.vocab_size),) * masked),
            "penalties": Penalties(places, places, values, values),
            "processed_logprobs": top,
            "raw_logprobs": {0: self.rng.randint(0, MAX_TOP_LOGPROBS)},
        }

    def _of_prompt(self, step: StepInputs) -> dict[str, Any]:
        sequence = self.rng.randrange(len(step.query_lens))
        if self.rng.random() < 0.5:
            return {"pooling": {sequence: PoolingInputs(self.rng.choice(("mean", "last")), None)}}
        count = self.rng.randint(1, int(step.query_lens[sequence]))
        num_top = self.rng.randint(0, MAX_TOP_LOGPROBS)
        successors = PromptSuccessors(np.zeros(count, dtype=np.int64), num_top)
        return {"prompt_logprobs": {sequence: successors}}


def _sampled(step: StepInputs, **fields: Any) -> StepInputs:
    return msgspec.structs.replace(step, sampling=msgspec.structs.replace(step.sampling, **fields))
