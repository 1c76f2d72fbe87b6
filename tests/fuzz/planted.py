"""Checks that bus fuzzing finds bugs. `python -m tests.fuzz.planted` plants bugs one by one into
the real handlers and runs the test as a test run does. The exit status is 1 if a bug is missed.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from hypothesis import Phase, settings

import services.gateway.streams.streams as streams
from services.decode.active_handoffs import ActiveHandoffs
from services.decode.service import DecodeService
from services.gateway.streams.early_entries import EarlyEntries
from services.gateway.streams.streams import Streams
from services.kv_index.service import KvIndexService
from services.prefill.service import PrefillService
from services.scheduler.request_queues import RequestQueues
from shared.output.output_buffer import OutputBuffer
from tests.fuzz.test_bus_messages import test_services_survive_wrong_messages
from tests.simulation.planted import Bug


def _nothing(right: Any) -> Any:
    return lambda *args, **kwargs: None


def _not_idempotent(right: Any) -> Any:
    def drop_choice(self: OutputBuffer, placement_id: bytes, choice_index: int) -> None:
        del self._outputs[placement_id][choice_index]
        self._outputs[placement_id][choice_index] = None  # type: ignore[assignment]
        right(self, placement_id, choice_index)

    return drop_choice


def _abort_of_unknown(right: Any) -> Any:
    def abort(self: DecodeService, placement_id: bytes) -> None:
        self._placements[placement_id]
        right(self, placement_id)

    return abort


def _control_of_unknown(right: Any) -> Any:
    def on_control(self: PrefillService, message: Any) -> None:
        for placement_id in getattr(message, "placement_ids", ()):
            self._prefills[placement_id]
        right(self, message)

    return on_control


def _try_of_unknown(right: Any) -> Any:
    def fail_try(self: ActiveHandoffs, placement_id: bytes, reason: str) -> None:
        next(each for each in self._under_way if each.current and each.current[1] == placement_id)
        right(self, placement_id, reason)

    return fail_try


def _placement_of_another(right: Any) -> Any:
    def on_placed(self: Streams, placed: Any, now: float) -> None:
        stream = self._by_request.get(placed.request_id)
        if stream is not None and stream.placement is None:
            self._run(stream, placed, now)
        else:
            right(self, placed, now)

    return on_placed


def _bad_hashes_raise(right: Any) -> Any:
    return lambda self, message: self.index.apply(message)


def _never_expired(right: Any) -> Any:
    return lambda self, now: []


def _cancel_of_unknown(right: Any) -> Any:
    return lambda self, message: self._forget(self._held[message.request_id])


def _keepalive_of_unknown(right: Any) -> Any:
    def on_keepalive(self: Streams, keepalive: Any, now: float) -> None:
        for request_id in keepalive.request_ids:
            self._by_request[request_id]
        right(self, keepalive, now)

    return on_keepalive


def _resend_of_unknown(right: Any) -> Any:
    def resend(self: OutputBuffer, placement_id: bytes, choice_index: int, position: int) -> Any:
        self._outputs[placement_id][choice_index]
        return right(self, placement_id, choice_index, position)

    return resend


def _prefill_again(right: Any) -> Any:
    def run_prefill(self: PrefillService, request: Any) -> Any:
        self._prefills.pop(request.placement_id, None)
        return right(self, request)

    return run_prefill


def _placement_again(right: Any) -> Any:
    def start_decode(self: DecodeService, command: Any) -> Any:
        self._placements.pop(command.placement_id, None)
        return right(self, command)

    return start_decode


MAX_EXAMPLES = 500  # a test run has fewer; which are drawn changes with the source of the test
BUGS = (
    Bug("a worker may send more than it was asked for", streams, "_fault_of", _nothing),
    Bug("a kept request is unknown", Streams, "on_keepalive", _keepalive_of_unknown),
    Bug("tokens of an unknown placement", OutputBuffer, "resend", _resend_of_unknown),
    Bug("a prefill comes twice", PrefillService, "_run_prefill", _prefill_again),
    Bug("a placement comes twice", DecodeService, "_start_decode", _placement_again),
    Bug("an output is dropped once only", OutputBuffer, "drop_choice", _not_idempotent),
    Bug("an unknown placement is aborted", DecodeService, "_abort", _abort_of_unknown),
    Bug("an unknown prefill is renewed", PrefillService, "_on_control", _control_of_unknown),
    Bug("an unknown try fails", ActiveHandoffs, "fail_try", _try_of_unknown),
    Bug("one placement for two requests", Streams, "on_placed", _placement_of_another),
    Bug("half a block hash", KvIndexService, "_take_events", _bad_hashes_raise),
    Bug("early tokens wait for ever", EarlyEntries, "expire", _never_expired),
    Bug("an unknown request is cancelled", RequestQueues, "cancel", _cancel_of_unknown),
)


def main(names: list[str]) -> int:
    test: Any = test_services_survive_wrong_messages
    usual_settings = test._hypothesis_internal_use_settings
    test._hypothesis_internal_use_settings = settings(
        usual_settings, max_examples=MAX_EXAMPLES, phases=(Phase.generate,)
    )
    bugs = [bug for bug in BUGS if not names or any(name in bug.name for name in names)]
    num_hidden = int(not bugs)
    for bug in bugs:
        began, found = time.monotonic(), ""
        with bug.planted():
            try:
                test()
            except BaseException as error:
                if isinstance(error, KeyboardInterrupt):
                    raise
                found = type(error).__name__
        num_hidden += not found
        seconds = time.monotonic() - began
        print(f"{bug.name:50} {found or 'NOT FOUND':20} {seconds:.1f} s", flush=True)
    return int(num_hidden > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
