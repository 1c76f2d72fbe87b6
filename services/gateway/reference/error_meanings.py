"""The meanings of the error codes, for the reference page and for the pages beside the dialects."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from shared.errors import HearthError

INTERNAL = "(between processes)"  # ends the meanings of codes that no client meets
MEANING: dict[str, str] = {
    "invalid_request": "the body is wrong; `param` names the field",
    "grammar_too_complex": "the grammar of the output takes too much time or memory",
    "missing_body": "the request has no body (Workers AI)",
    "malformed_model_id": "the path ends with no possible model id (Workers AI)",
    "lora_not_supported": "LoRA adapters are not supported (Workers AI)",
    "foreign_account": "the path names another account than that of the key (Workers AI)",
    "exceeds_limit": "this request alone is more than a limit of the tenant allows",
    "prefix_too_short": "the prefix does not fill one block",
    "invalid_api_key": "no API key, or an unknown one",
    "permission_denied": "the tenant may not do this",
    "unknown_tenant": "the key is known, its tenant is not",
    "tenant_copy_stale": "the tenant's home is another site, which has been silent for too long",
    "limit_is_zero": "requests are disabled for this tenant by a limit of 0",
    "model_not_allowed": "the tenant may not use this model",
    "no_region_allowed": "the tenant's data may be in no region, or not in that of this gateway",
    "outside_regions": "a process of another region refuses the tenant's data",
    "send_forbidden": "the gateway may not send the tenant's data: it is in another region",
    "zero_retention": "tenants with zero retention have no named prefixes and no stored responses",
    "impostor": "a process used another's name (between processes)",
    "model_not_found": "the gateway does not serve this model",
    "not_found": "no such route",
    "response_not_found": "the tenant has no stored response or item of this id",
    "prefix_not_found": "no prefix of this name",
    "method_not_allowed": "the route does not take this method",
    "too_many_prefixes": "the tenant has as many prefixes as allowed: delete one",
    "prefix_storage_full": "all prefixes of the tenant take as much as allowed: delete one",
    "all_prefixes_full": "all tenants' prefixes take as much of Redis as its operator allows",
    "prefix_too_large": "the prefix has much text that the template does not render",
    "unknown_placement": "the worker does not hold the request any more (between processes)",
    "context_length_exceeded": "the prompt does not fit the context of the model",
    "payload_too_large": "the body, or the field `param`, is larger than its bound",
    "unsupported_media_type": "the body is compressed or encoded in a form that is not read",
    "overloaded": "a queue, the gateway or a tenant's output buffer is full",
    "rate_limit_exceeded": "a limit of the tenant; the four codes below name it",
    "requests_per_min_exceeded": "the tenant's requests of this minute are used up",
    "input_tokens_per_min_exceeded": "the tenant's prompt tokens of this minute are used up",
    "output_tokens_per_min_exceeded": "the tenant's output tokens of this minute are used up",
    "concurrency_exceeded": "the tenant has as many requests open as allowed",
    "request_cancelled": "the client has cancelled the request (over NATS)",
    "internal_error": "a defect of Hearth; the log has the request's id",
    "grammar_failed": "the grammar was too complex on a worker, maybe after some output",
    "grammar_replay_failed": "the output so far does not match the grammar: a defect of Hearth",
    "request_breaks_workers": "steps of two workers raised for this request alone",
    "no_capacity": "no worker can serve this now",
    "no_capable_worker": "no live worker of the model has the features that the request needs",
    "dependency_unavailable": "NATS or a peer does not answer",
    "store_unavailable": "Redis does not answer",
    "store_refused": "Redis answered with an error: for example, a record has the wrong type",
    "no_responders": "no process listens, for example no scheduler",
    "request_timeout": "a process did not reply in time",
    "link_lost": "the KV connection ended (between processes)",
    "frame_refused": "the receiver rejected KV (between processes)",
    "kv_mismatch": "KV has another format or other numerics than its receiver (between processes)",
    "worker_busy": "a worker has no room (between processes)",
    "worker_unfit": "a worker will not serve this request, whenever it comes (between processes)",
    "context_full": "a worker's KV cache is smaller than the request (between processes)",
    "step_failed": "a step of a worker raised for this request alone (between processes)",
    "out_of_memory": "the devices of two workers had no memory for a step of this request",
    "device_failed": "the device of a worker failed (between processes)",
    "deadline_exceeded": "the request took longer than `--request-timeout-s`",
}


class ErrorRow(msgspec.Struct, frozen=True, order=True):
    """A row of the reference page's table of errors."""

    status: int
    code: str
    type: str
    meaning: str


def error_rows() -> list[ErrorRow]:
    """Returns the errors that clients meet, by status and code."""
    classes = {each.code: each for each in descendants(HearthError) if each.code in MEANING}
    rows = (
        ErrorRow(each.http_status, code, each.openai_type, MEANING[code])
        for code, each in classes.items()
        if not MEANING[code].endswith(INTERNAL)
    )
    return sorted(rows)


def descendants(root: type[HearthError]) -> Iterator[type[HearthError]]:
    """Yields the class and all classes below it."""
    yield root
    for child in root.__subclasses__():
        yield from descendants(child)
