"""Checks the grammars of requests in a killable process: python -m … [frames on stdin, stdout].

This process has a memory limit, and an alarm that kills it when a grammar uses too much CPU time.
"""

from __future__ import annotations

import resource
import signal
import time
from pathlib import Path
from threading import Thread

import msgspec

from services.gateway.grammars.grammar_request import GrammarRequest
from services.gateway.grammars.plan_checks import PlanChecks
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
from services.gateway.tools.families import PLAIN
from services.gateway.tools.family import Family
from shared.errors import CheckpointError, GrammarTooComplex, HearthError
from shared.grammar.vocabulary import load_vocabulary
from shared.lifecycle.child_process import lower_priority

MAX_MEMORY_BYTES = 512 << 20  # besides the vocabulary
USUAL_CPU_S = 0.02  # a longer check yields the processor from then on
SLOW_NICENESS = 5  # more than the process has; with more, it would starve on a busy machine

_decoder: msgspec.msgpack.Decoder[Job] = msgspec.msgpack.Decoder(Job)
_request_decoder = msgspec.msgpack.Decoder(GrammarRequest)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the gateway ends this process after draining
    data = read_frame()
    if data is None:
        return
    checks = _plan_checks(msgspec.msgpack.decode(data, type=ProcessSetup))
    _limit_memory()
    while (data := read_frame()) is not None:
        job = _decoder.decode(data)
        assert isinstance(job, CheckJob), "the pool's jobs"
        signal.setitimer(signal.ITIMER_PROF, limit_s(job))
        began_s = time.process_time()
        reply = checks if isinstance(checks, Rejected) else checked_in_thread(job, checks)
        finished = frame(Finished(reply, time.process_time() - began_s))
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        write_frame(finished)


def _plan_checks(setup: ProcessSetup) -> PlanChecks | Rejected:
    """The reply to every grammar if the model's files allow none."""
    try:
        vocabulary = load_vocabulary(
            Path(setup.model_dir), vocab_size=None, eos_token_ids=setup.eos_token_ids
        )
    except CheckpointError as error:
        return Rejected(f"this model cannot be constrained: {error.message}", None)
    family = msgspec.msgpack.decode(setup.family, type=Family) if setup.family else PLAIN
    return PlanChecks(vocabulary, family, setup.added_ids.get)


def checked_in_thread(job: CheckJob, checks: PlanChecks) -> Checked | Rejected:
    """In a thread of its own, since a priority once lowered cannot be raised again."""
    replies: list[Checked | Rejected] = []
    thread = Thread(target=lambda: replies.append(check(job, checks)))
    began_s = time.process_time()
    thread.start()
    while thread.is_alive():
        thread.join(USUAL_CPU_S)
        if time.process_time() - began_s > USUAL_CPU_S and thread.native_id is not None:
            lower_priority(thread.native_id, SLOW_NICENESS)
            thread.join()
    return replies[0]


def check(job: CheckJob, checks: PlanChecks) -> Checked | Rejected:
    try:
        checked = checks.check(_request_decoder.decode(job.request))
        return Checked(b"" if checked is None else msgspec.msgpack.encode(checked))
    except HearthError as error:
        return Rejected(error.message, error.param, error.code)
    except MemoryError:
        return Rejected(CHECK_TIMEOUT, None, GrammarTooComplex.code)
    except BaseException as error:  # the process continues with other tenants' grammars
        return Rejected(f"invalid grammar: {type(error).__name__}", None)


def _limit_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    limit = pages * resource.getpagesize() + MAX_MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, most))


if __name__ == "__main__":
    main()
