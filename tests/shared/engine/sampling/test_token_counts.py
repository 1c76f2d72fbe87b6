from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from shared.engine.sampling.token_counts import TokenCounts

TOKENS = st.lists(st.integers(0, 9), max_size=30)


@given(TOKENS, TOKENS, st.sets(st.integers(0, 60)))
def test_counts_do_not_depend_on_the_calls_of_advance(
    prompt: list[int], output: list[int], stops: set[int]
) -> None:
    counts, token_ids = TokenCounts(), [*prompt, *output]
    for stop in sorted(each for each in stops if len(prompt) <= each < len(token_ids)):
        counts.advance(token_ids[:stop], len(prompt))
    counts.advance(token_ids, len(prompt))
    in_output = Counter(output)
    assert counts.token_ids().tolist() == list(dict.fromkeys(token_ids))
    assert counts.in_output().tolist() == [in_output[each] for each in dict.fromkeys(token_ids)]


def test_returned_counts_do_not_change_later() -> None:
    counts = TokenCounts()
    counts.advance([5, 6], 1)
    token_ids, in_output = counts.token_ids(), counts.in_output()
    counts.advance([5, 6, 6, 7], 1)
    assert (token_ids.tolist(), in_output.tolist()) == ([5, 6], [0, 1])
