"""Native code that takes too long costs its own request, and a thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from llguidance import LLMatcher, LLTokenizer

from shared.engine.token_masks.compile_cache import CompileCache, CompiledGrammar
from shared.engine.token_masks.mask_threads import MaskThreads
from shared.errors import GrammarFailed
from shared.grammar.matcher import Matcher
from shared.grammar.spec import GrammarSpec
from tests.shared.grammar.support import EOS, MODEL_DIR

WAIT_S = 30.0
SLOW = "(a{900}){900}"  # 1 s for its first mask, without the limits of the seam


@pytest.fixture
def threads() -> Iterator[MaskThreads]:
    threads = MaskThreads(max_job_s=0.25)
    yield threads
    threads.close()


TOKENIZER = LLTokenizer((MODEL_DIR / "tokenizer.json").read_text(), eos_token=[EOS])


def unlimited(kind: str, source: str) -> Matcher:
    matcher = LLMatcher(TOKENIZER, LLMatcher.grammar_from_regex(source), log_level=0)
    return Matcher(matcher, TOKENIZER, None)


def waited(compiled: CompiledGrammar) -> CompiledGrammar:
    done = threading.Event()
    compiled.when_done(done.set)
    assert done.wait(WAIT_S)
    return compiled


def test_slow_grammar_fails_and_others_are_compiled_meanwhile(threads: MaskThreads) -> None:
    cache = CompileCache(unlimited, threads)
    slow = cache.get("a", GrammarSpec(kind="regex", source=SLOW))
    assert isinstance(waited(slow).error, GrammarFailed)
    assert threads.num_abandoned_threads == 1
    other = waited(cache.get("b", GrammarSpec(kind="regex", source="x")))
    assert other.error is None
    again = waited(cache.get("a", GrammarSpec(kind="regex", source=SLOW)))
    assert again is not slow and isinstance(again.error, GrammarFailed)
    assert cache.get("a", GrammarSpec(kind="regex", source=SLOW)) is again  # not a third time
