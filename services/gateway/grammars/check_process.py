"""Compiles and tries grammars in a killable process: python -m … [frames on stdin, stdout].

A grammar of a client may take seconds or gigabytes, at once or at its hundredth token. This process
has a memory limit, and an alarm that kills it when a grammar uses too much CPU time.
"""

from __future__ import annotations

import resource
import signal
import time
from pathlib import Path
from random import Random

import msgspec

from services.gateway.text.process_jobs import (
    CHECK_TIMEOUT,
    Checked,
    CheckJob,
    Finished,
    Job,
    ProcessSetup,
    Rejected,
    frame,
    limit_s,
)
from services.gateway.text.template_process import read_frame, write_frame
from shared.errors import CheckpointError, GrammarTooComplex, HearthError, InvalidRequest
from shared.grammar.gbnf import lark_of
from shared.grammar.matcher import NO_OUTPUT, Matcher
from shared.grammar.vocabulary import Vocabulary, load_vocabulary

MAX_MEMORY_BYTES = 512 << 20  # besides the vocabulary
MAX_CPU_S = 0.1  # to compile the grammar and to fill all masks
NUM_MASKS = 65  # of the grammar's start, and along a walk of allowed tokens
SEED = 21

_decoder: msgspec.msgpack.Decoder[Job] = msgspec.msgpack.Decoder(Job)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the gateway ends this process after draining
    data = read_frame()
    if data is None:
        return
    vocabulary = _vocabulary(msgspec.msgpack.decode(data, type=ProcessSetup))
    _limit_memory()
    while (data := read_frame()) is not None:
        job = _decoder.decode(data)
        assert isinstance(job, CheckJob), "the pool's jobs"
        signal.setitimer(signal.ITIMER_PROF, limit_s(job))
        began_s = time.process_time()
        reply = vocabulary if isinstance(vocabulary, Rejected) else check(job, vocabulary)
        finished = frame(Finished(reply, time.process_time() - began_s))
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        write_frame(finished)


def _vocabulary(setup: ProcessSetup) -> Vocabulary | Rejected:
    """The reply to every grammar if the model's files allow none."""
    try:
        return load_vocabulary(
            Path(setup.model_dir), vocab_size=None, eos_token_ids=setup.eos_token_ids
        )
    except CheckpointError as error:
        return Rejected(f"this model cannot be constrained: {error.message}", None)


def check(job: CheckJob, vocabulary: Vocabulary) -> Checked | Rejected:
    try:
        return _checked(job, vocabulary)
    except HearthError as error:
        is_empty = NO_OUTPUT in error.message
        return Rejected(error.message, None, InvalidRequest.code if is_empty else error.code)
    except MemoryError:
        return Rejected(CHECK_TIMEOUT, None, GrammarTooComplex.code)
    except BaseException as error:  # a panic of native code, which is no Exception
        return Rejected(f"invalid grammar: {type(error).__name__}", None)


def _checked(job: CheckJob, vocabulary: Vocabulary) -> Checked:
    began_s = time.process_time()
    is_gbnf = job.kind == "gbnf"
    source = lark_of(job.source) if is_gbnf else job.source
    matcher = vocabulary.compile("lark" if is_gbnf else job.kind, source)
    _walk(matcher, began_s)
    return Checked(source if is_gbnf else "", matcher.warnings)


def _walk(matcher: Matcher, began_s: float) -> None:
    """Fills masks along allowed tokens. Raises GrammarTooComplex."""
    random, start = Random(SEED), matcher.copy()
    for _ in range(NUM_MASKS):
        words = matcher.fill()
        if time.process_time() - began_s > MAX_CPU_S:
            raise GrammarTooComplex(CHECK_TIMEOUT)
        token_id = _random_token(words, random)
        if token_id is None or not matcher.accept([token_id]) or matcher.is_complete:
            matcher = start.copy()


def _random_token(words: bytes, random: Random) -> int | None:
    """One of the set bits, at or after a random byte."""
    start = random.randrange(len(words))
    for part, offset in ((words[start:], start), (words, 0)):
        rest = part.lstrip(b"\0")
        if rest:
            bits = [bit for bit in range(8) if rest[0] >> bit & 1]
            return (offset + len(part) - len(rest)) * 8 + random.choice(bits)
    return None


def _limit_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    limit = pages * resource.getpagesize() + MAX_MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, most))


if __name__ == "__main__":
    main()
