"""Compiled grammars, each with its first mask, by tenant and digest."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable

from shared.engine.token_masks.mask_threads import GrammarThreads
from shared.errors import GrammarFailed, HearthError
from shared.grammar.matcher import Matcher
from shared.grammar.spec import GrammarSpec

MAX_GRAMMARS = 256  # 0.1 to 1 MB each

Compile = Callable[[str, str], Matcher]  # kind and source, as in `GrammarSpec`


class CompiledGrammar:
    """A job of the slow thread. Its matcher stays before the first token and is only copied."""

    def __init__(self, tenant_id: str, spec: GrammarSpec, compile_: Compile) -> None:
        self.tenant_id = tenant_id
        self.error: HearthError | None = None
        self.first_words: bytes | None = None
        self._matcher: Matcher | None = None
        self._spec = spec
        self._compile = compile_
        self._lock = threading.Lock()
        self._is_done = False
        self.has_timed_out = self.is_retry = False
        self._waiting: list[Callable[[], None]] = []

    @property
    def is_done(self) -> bool:
        """Compiled, or failed."""
        return self._is_done

    def new_matcher(self) -> Matcher:
        """Requires that it is compiled."""
        if self._matcher is None:
            raise self.error or GrammarFailed("the grammar is not compiled yet")
        return self._matcher.copy()

    def when_done(self, callback: Callable[[], None]) -> None:
        """Calls it now, or on the thread that compiles."""
        with self._lock:
            if not self._is_done:
                self._waiting.append(callback)
                return
        callback()

    def run(self) -> None:
        try:
            matcher = self._compile(self._spec.kind, self._spec.source)
            first_words = matcher.fill()
        except HearthError as error:
            self._end(error=error)
        except BaseException as error:  # native code panics with one; the thread continues
            self._end(error=GrammarFailed(f"the grammar cannot be compiled: {error!r}"))
        else:
            self._end(matcher, first_words)

    def time_out(self) -> None:
        self.has_timed_out = True
        self._end(error=GrammarFailed("the grammar takes too long to compile"))

    def _end(
        self,
        matcher: Matcher | None = None,
        first_words: bytes | None = None,
        error: HearthError | None = None,
    ) -> None:
        """The first end counts: a job that has timed out may still return."""
        with self._lock:
            if self._is_done:
                return
            self._matcher, self.first_words, self.error = matcher, first_words, error
            self._is_done = True
            waiting, self._waiting = self._waiting, []
        for callback in waiting:
            callback()


class CompileCache:
    """Used on one thread. A grammar that failed stays so; one that timed out is compiled once more,
    since the machine may have stood still.
    """

    def __init__(self, compile_: Compile, threads: GrammarThreads) -> None:
        self._compile = compile_
        self._threads = threads
        self._grammars: OrderedDict[tuple[str, bytes], CompiledGrammar] = OrderedDict()

    def clear(self) -> None:
        self._grammars.clear()

    def forget(self, tenant_id: str) -> None:
        for key in [each for each in self._grammars if each[0] == tenant_id]:
            del self._grammars[key]

    def get(self, tenant_id: str, spec: GrammarSpec) -> CompiledGrammar:
        """Starts to compile an unknown one."""
        key = (tenant_id, spec.digest)
        known = self._grammars.get(key)
        if known is not None and (known.is_retry or not known.has_timed_out):
            self._grammars.move_to_end(key)
            return known
        grammar = self._grammars[key] = CompiledGrammar(tenant_id, spec, self._compile)
        grammar.is_retry = known is not None
        if len(self._grammars) > MAX_GRAMMARS:
            self._grammars.popitem(last=False)
        self._threads.submit_slow(grammar)
        self._threads.watch(grammar)
        return grammar
