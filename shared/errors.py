"""The exception tree.

Every class has a wire `code` (its identity on NATS and in OpenAI's error envelope), an HTTP status
and OpenAI's error `type`. `bus.py` converts an exception to a `Failure` message and back.

    HearthError
    ├── InvalidRequest            400  the request is invalid: a retry fails again
    │   ├── PromptTooLong         400
    │   ├── PayloadTooLarge       413
    │   ├── GrammarTooComplex     400  it compiles or advances too slowly
    │   │   └── GrammarFailed     400  found by a worker, maybe after some output
    │   └── UnknownModel          404
    ├── AuthenticationFailed      401
    ├── SenderMismatch            403  a message names another process as its sender
    ├── Overloaded                429  queues are full: retry later
    ├── NoCapacity                503  no worker can serve this now
    │   └── NoCapableWorker       503  no live worker has the features that the request needs
    ├── DependencyUnavailable     503  NATS, Redis or a peer does not answer
    │   ├── NoResponders
    │   ├── RequestTimeout
    │   ├── LinkLost                   the KV data plane's connection ended
    │   └── FrameRefused               the receiver rejected this KV
    ├── DeadlineExceeded          504
    ├── WorkerBusy                503  this worker rejects; another may accept
    │   └── WorkerUnfit           503  this worker will not serve this request at any time
    │       ├── ContextFull       503  its KV cache is smaller than the request
    │       └── OutsideRegions    403  a process outside of the tenant's regions refuses its data
    │           └── SendForbidden 403  this process may not send data of the tenant's region class
    ├── StepFailed                503  a step raised for this request alone; another worker may not
    ├── OutOfMemory               503  this worker's device has no memory for it; another's may
    ├── DeviceFailed              503  this worker's device fails; another worker's may not
    ├── GrammarReplayFailed       500  the output so far does not match the request's grammar
    ├── RequestBreaksWorkers      500  the request alone failed steps of several workers
    ├── UnknownPlacement          410  the worker never held it, or has removed it
    ├── ConfigError                    the process does not start
    └── CheckpointError                the process does not start
"""

from __future__ import annotations

from typing import ClassVar


class HearthError(Exception):
    """The base of all Hearth errors. The message is written for the caller to read."""

    code: ClassVar[str] = "internal_error"
    http_status: ClassVar[int] = 500
    openai_type: ClassVar[str] = "server_error"

    def __init__(
        self, message: str, *, param: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s

    @property
    def is_of_cluster(self) -> bool:
        """Whether the cluster could not serve a request that may be valid."""
        return self.http_status >= 500 or isinstance(self, Overloaded)

    @property
    def public_message(self) -> str:
        """The message for a gateway's clients. It differs where `message` is for operators."""
        return self.message


class InvalidRequest(HearthError):
    code = "invalid_request"
    http_status = 400
    openai_type = "invalid_request_error"


class PromptTooLong(InvalidRequest):
    code = "context_length_exceeded"


class PayloadTooLarge(InvalidRequest):
    code = "payload_too_large"
    http_status = 413


class GrammarTooComplex(InvalidRequest):
    code = "grammar_too_complex"


class GrammarFailed(GrammarTooComplex):
    code = "grammar_failed"


class UnknownModel(InvalidRequest):
    code = "model_not_found"
    http_status = 404


class AuthenticationFailed(HearthError):
    code = "invalid_api_key"
    http_status = 401
    openai_type = "authentication_error"


class SenderMismatch(HearthError):
    code = "impostor"
    http_status = 403


class Overloaded(HearthError):
    code = "overloaded"
    http_status = 429
    openai_type = "rate_limit_error"


class NoCapacity(HearthError):
    code = "no_capacity"
    http_status = 503


class NoCapableWorker(NoCapacity):
    code = "no_capable_worker"


class DependencyUnavailable(HearthError):
    code = "dependency_unavailable"
    http_status = 503


class NoResponders(DependencyUnavailable):
    code = "no_responders"


class RequestTimeout(DependencyUnavailable):
    code = "request_timeout"


class LinkLost(DependencyUnavailable):
    code = "link_lost"


class FrameRefused(DependencyUnavailable):
    code = "frame_refused"


class KvMismatch(FrameRefused):
    """The KV has another format or other numerics than its receiver."""

    code = "kv_mismatch"


class DeadlineExceeded(HearthError):
    code = "deadline_exceeded"
    http_status = 504


class WorkerBusy(HearthError):
    code = "worker_busy"
    http_status = 503


class WorkerUnfit(WorkerBusy):
    code = "worker_unfit"


class ContextFull(WorkerUnfit):
    code = "context_full"


class OutsideRegions(WorkerUnfit):
    code = "outside_regions"
    http_status = 403
    openai_type = "permission_error"


class SendForbidden(OutsideRegions):
    code = "send_forbidden"


class StepFailed(HearthError):
    code = "step_failed"
    http_status = 503


class OutOfMemory(HearthError):
    code = "out_of_memory"
    http_status = 503


class DeviceFailed(HearthError):
    code = "device_failed"
    http_status = 503


class GrammarReplayFailed(HearthError):
    code = "grammar_replay_failed"


class RequestBreaksWorkers(HearthError):
    code = "request_breaks_workers"


class UnknownPlacement(HearthError):
    code = "unknown_placement"
    http_status = 410


class NameInUse(HearthError):
    """Another process uses the process id of this one."""

    code = "name_in_use"


class ConfigError(HearthError):
    code = "config_error"


class CheckpointError(HearthError):
    code = "checkpoint_error"


def _tree(root: type[HearthError]) -> dict[str, type[HearthError]]:
    classes = {root.code: root}
    for child in root.__subclasses__():
        classes.update(_tree(child))
    return classes


ERROR_BY_CODE: dict[str, type[HearthError]] = _tree(HearthError)
CAPACITY_CODES = frozenset(_tree(Overloaded)) | frozenset(_tree(NoCapacity))
CLUSTER_CODES = frozenset(
    code for code, each in ERROR_BY_CODE.items() if each.http_status >= 500 or each is Overloaded
)
