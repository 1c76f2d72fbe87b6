"""Checks the grammars of requests in a killable process: python -m … (frames on stdin, stdout).

This process has a memory limit, and an alarm that kills it when a grammar uses too much CPU time.
"""

from __future__ import annotations

import resource
import signal
import time
from pathlib import Path
from threading import Thread

import msgspec

from services.gateway.preparation.recently_used import RecentlyUsed
from services.gateway.preparation.template_process import read_frame, write_frame
from services.gateway.structured.grammars.grammar_request import GrammarRequest
from services.gateway.structured.grammars.plan_checks import PlanChecks
from services.gateway.structured.tools.families import PLAIN
from services.gateway.structured.tools.family import Family
from services.gateway.text.process_jobs import (
    CHECK_TIMEOUT,
    MAX_SETUPS,
    Checked,
    CheckJob,
    Job,
    JobFinished,
    JobRejected,
    ProcessSetup,
    SelectModel,
    frame,
    limit_s,
)
from shared.errors import CheckpointError, GrammarTooComplex, HearthError
from shared.grammar.vocabulary import load_vocabulary
from shared.lifecycle.child_process import lower_priority

MAX_MEMORY_BYTES = 512 << 20  # excludes the vocabularies
MAX_VOCABULARIES = 4  # the most recently used; each takes up to 100 MB
USUAL_CPU_S = 0.02  # longer checks continue at a lower priority
SLOW_NICENESS = 5  # added to the process's; with more, it would starve on a busy machine

_decoder = msgspec.msgpack.Decoder(ProcessSetup | SelectModel | Job)
_request_decoder = msgspec.msgpack.Decoder(GrammarRequest)


class _CheckedModels:
    """The models of this process: their setups, and the vocabularies of MAX_VOCABULARIES
    of them.
    """

    def __init__(self) -> None:
        self._setups: RecentlyUsed[str, ProcessSetup] = RecentlyUsed(MAX_SETUPS)
        self._checks: RecentlyUsed[str, PlanChecks | JobRejected] = RecentlyUsed(MAX_VOCABULARIES)
        self._selected = ""

    def add(self, setup: ProcessSetup) -> None:
        """Selects a model and loads its vocabulary, so that the first grammar does not
        wait for it.
        """
        self._setups.put(setup.key, setup)
        self._selected = setup.key
        self.checks()

    def select(self, key: str) -> None:
        self._setups.get(key)
        self._selected = key

    def checks(self) -> PlanChecks | JobRejected:
        """Returns the checks of the selected model."""
        found = self._checks.get(self._selected)
        if found is None:
            setup = self._setups.get(self._selected)
            assert setup is not None, "the gateway sends a setup before it selects the model"
            found = _plan_checks(setup)
            self._checks.put(self._selected, found)
        return found


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the gateway ends this process after draining
    models = _CheckedModels()
    while (data := read_frame()) is not None:
        match _decoder.decode(data):
            case ProcessSetup() as setup:
                models.add(setup)
            case SelectModel(key):
                models.select(key)
            case CheckJob() as job:
                write_frame(_answered(job, models.checks()))
            case other:
                raise TypeError(f"{type(other).__name__} is no job of this process")


def _answered(job: CheckJob, checks: PlanChecks | JobRejected) -> bytearray:
    signal.setitimer(signal.ITIMER_PROF, limit_s(job))
    began_s = time.process_time()
    reply = checks if isinstance(checks, JobRejected) else checked_in_thread(job, checks)
    finished = frame(JobFinished(reply, time.process_time() - began_s))
    signal.setitimer(signal.ITIMER_PROF, 0.0)
    return finished


def _plan_checks(setup: ProcessSetup) -> PlanChecks | JobRejected:
    """Returns the checks of a model or, if its files allow no grammar, the rejection of all
    grammars.
    """
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    try:
        vocabulary = load_vocabulary(
            Path(setup.model_dir), vocab_size=None, eos_token_ids=setup.eos_token_ids
        )
    except CheckpointError as error:
        return JobRejected(f"this model cannot be constrained: {error.message}", None)
    finally:
        _limit_memory()
    family = msgspec.msgpack.decode(setup.family, type=Family) if setup.family else PLAIN
    return PlanChecks(vocabulary, family, setup.added_ids.get)


def checked_in_thread(job: CheckJob, checks: PlanChecks) -> Checked | JobRejected:
    """Checks in a thread of its own, since a priority once lowered cannot be raised again."""
    replies: list[Checked | JobRejected] = []
    thread = Thread(target=lambda: replies.append(check(job, checks)))
    began_s = time.process_time()
    thread.start()
    while thread.is_alive():
        thread.join(USUAL_CPU_S)
        if time.process_time() - began_s > USUAL_CPU_S and thread.native_id is not None:
            lower_priority(thread.native_id, SLOW_NICENESS)
            thread.join()
    return replies[0]


def check(job: CheckJob, checks: PlanChecks) -> Checked | JobRejected:
    try:
        checked = checks.check(_request_decoder.decode(job.request))
        return Checked(b"" if checked is None else msgspec.msgpack.encode(checked))
    except HearthError as error:
        return JobRejected(error.message, error.param, error.code)
    except MemoryError:
        return JobRejected(CHECK_TIMEOUT, None, GrammarTooComplex.code)
    except BaseException as error:  # the process continues with other tenants' grammars
        return JobRejected(f"invalid grammar: {type(error).__name__}", None)


def _limit_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    limit = pages * resource.getpagesize() + MAX_MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, most))


if __name__ == "__main__":
    main()
