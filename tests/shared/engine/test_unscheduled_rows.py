"""Rows that leave a step which computed none of them."""

from __future__ import annotations

import random

from shared.engine.batching.sequence import SequenceState
from tests.support.engine.rig import Rig, greedy, new_sequence, prompt, seeded, solo


def test_unscheduled_rows_are_scheduled_again_with_the_same_tokens() -> None:
    """Chunks, decodes, and choices whose step copies a block of their prompt; aborts meanwhile."""
    rig, rng = Rig(max_sequences=16), random.Random(3)
    parent = rig.add(new_sequence(prompt(6), None))
    while parent.state is not SequenceState.HELD:
        rig.step()
    ids = [[*prompt(6), 300 + n] for n in range(3)]
    choices = rig.fork(
        parent, [new_sequence(each, seeded(9), choice_index=n) for n, each in enumerate(ids)]
    )
    prompts = [prompt(3 + 30 * n, start=100 * n + 7) for n in range(4)]
    rows = [rig.add(new_sequence(each, greedy(9))) for each in prompts]
    aborted = rig.add(new_sequence(prompt(5), greedy(9)))
    num_copies = 0
    for turn in range(60):
        step = rig.begin()
        num_copies += sum(len(each.block_copies) for each in step)
        if turn == 5:
            rig.engine.abort(aborted)
        if rng.random() < 0.5 or turn == 0:
            rig.rows = []
            rig.engine.batcher.limit.lower(64)
            rig.engine.unschedule(step)
            rig.check()
        else:
            rig.end(step)
    rig.run()
    assert num_copies > 0
    for n, each in enumerate(choices):
        assert rig.output(each) == solo(tuple(ids[n]), seeded(9), choice_index=n)
    for token_ids, each in zip(prompts, rows, strict=True):
        assert rig.output(each) == solo(tuple(token_ids), greedy(9))
