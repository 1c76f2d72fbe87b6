"""Compiles and tries grammars in a killable process: python -m … [frames on stdin, stdout].

A grammar of a client may take seconds or gigabytes, at once or at its hundredth token. This process
has a memory limit, and an alarm that kills it when a grammar uses too much CPU time.
"""

from __future__ import annotations

import re
import resource
import signal
import time
from pathlib import Path
from random import Random

import msgspec
from llguidance import LLMatcher, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark

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
from shared.errors import GrammarTooComplex, InvalidRequest

MAX_MEMORY_BYTES = 512 << 20  # besides the vocabulary
MAX_CPU_S = 0.1  # to compile the grammar and to fill all masks
NUM_MASKS = 65  # of the grammar's start, and along a walk of allowed tokens
SEED = 21
MAX_REASON_CHARS = 400

NO_OUTPUT = "no output matches the grammar, or a part of it"
# In the messages of native code.
_TOO_COMPLEX = re.compile(r"too (complex|large|big|many|deep|much)|limit|fuel", re.IGNORECASE)
_DEAD_END = "NoExtension"
_decoder: msgspec.msgpack.Decoder[Job] = msgspec.msgpack.Decoder(Job)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the gateway ends this process after draining
    data = read_frame()
    if data is None:
        return
    setup = msgspec.msgpack.decode(data, type=ProcessSetup)
    source = (Path(setup.model_dir) / "tokenizer.json").read_text(encoding="utf-8")
    tokenizer = LLTokenizer(source, eos_token=list(setup.eos_token_ids) or None)
    check("regex", "a", tokenizer)  # the first grammar takes longer
    _limit_memory()
    while (data := read_frame()) is not None:
        job = _decoder.decode(data)
        assert isinstance(job, CheckJob), "the pool's jobs"
        signal.setitimer(signal.ITIMER_PROF, limit_s(job))
        began_s = time.process_time()
        reply = check(job.kind, job.source, tokenizer)
        finished = frame(Finished(reply, time.process_time() - began_s))
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        write_frame(finished)


def check(kind: str, source: str, tokenizer: LLTokenizer) -> Checked | Rejected:
    try:
        return _checked(kind, source, tokenizer)
    except (ValueError, MemoryError, RecursionError) as error:
        return _rejection(str(error) or type(error).__name__)
    except Exception as error:  # of the converter of GBNF, or of native code, which may panic
        return Rejected(_short(str(error)), None)


def _checked(kind: str, source: str, tokenizer: LLTokenizer) -> Checked | Rejected:
    began_s = time.process_time()
    converted = any_to_lark(source) if kind == "gbnf" else ""
    source = converted or source
    matcher = LLMatcher(tokenizer, _compiled_form(kind, source), log_level=0)
    reason = matcher.get_error() or _walk(matcher, began_s)
    if reason:
        return _rejection(reason)
    return Checked(converted, matcher.get_grammar_warnings())


def _compiled_form(kind: str, source: str) -> str:
    match kind:
        case "json_schema":
            return LLMatcher.grammar_from_json_schema(source)
        case "regex":
            return LLMatcher.grammar_from_regex(source)
        case _:
            return LLMatcher.grammar_from_lark(source)


def _walk(matcher: LLMatcher, began_s: float) -> str:
    """Fills masks along allowed tokens. Returns why the grammar cannot be used; empty if it can."""
    if matcher.is_stopped() and not matcher.is_accepting():
        return NO_OUTPUT
    random = Random(SEED)
    for _ in range(NUM_MASKS):
        mask = matcher.compute_bitmask()
        if time.process_time() - began_s > MAX_CPU_S:
            return CHECK_TIMEOUT
        if matcher.is_error():
            return matcher.get_error()
        token_id = _random_token(mask, random)
        if token_id is None:
            return "" if matcher.is_accepting() else NO_OUTPUT
        if not matcher.consume_token(token_id):
            return matcher.get_error()
        if matcher.is_stopped() and not (matcher.is_accepting() and matcher.reset()):
            return matcher.get_error() or NO_OUTPUT
    return ""


def _random_token(mask: bytes, random: Random) -> int | None:
    """One of the set bits, at or after a random byte."""
    start = random.randrange(len(mask))
    for part, offset in ((mask[start:], start), (mask, 0)):
        rest = part.lstrip(b"\0")
        if rest:
            bits = [bit for bit in range(8) if rest[0] >> bit & 1]
            return (offset + len(part) - len(rest)) * 8 + random.choice(bits)
    return None


def _rejection(reason: str) -> Rejected:
    reason, _, _ = reason.partition("<state>")
    if reason.startswith(_DEAD_END):
        return Rejected(NO_OUTPUT, None)
    error = GrammarTooComplex if _TOO_COMPLEX.search(reason) is not None else InvalidRequest
    return Rejected(_short(reason), None, error.code)


def _short(reason: str) -> str:
    """Without the source that native messages quote."""
    text = " ".join(line.strip() for line in reason.splitlines() if not _is_quote(line))
    return text[:MAX_REASON_CHARS]


def _is_quote(line: str) -> bool:
    return re.match(r"\s*(\d+ \||\^)|\s*\^", line) is not None


def _limit_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    limit = pages * resource.getpagesize() + MAX_MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, most))


if __name__ == "__main__":
    main()
