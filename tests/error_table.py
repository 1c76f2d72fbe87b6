"""The tables of errors in the pages of the API, generated from the error classes.

python -m tests.error_table            print the tables
python -m tests.error_table --write    put them into the API.md of services/gateway/dialects
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import services.gateway.dialects.prefixes.errors
import services.gateway.dialects.responses.storage.errors
import services.gateway.dialects.workers_ai.errors
import services.gateway.dialects.workers_ai.model_id
import services.gateway.http.errors
import services.gateway.nats_api.errors
import services.gateway.tenancy.errors
import shared.errors
import shared.store
import shared.tenancy.pinned_prefix
from benchmarks.readme_table import replaced
from services.gateway.dialects.workers_ai.errors import number_of
from shared.errors import HearthError

DIALECTS = Path(__file__).resolve().parent.parent / "services" / "gateway" / "dialects"
MARKER = "errors (tests/error_table.py)"
WORKERS_AI_MARKER = "errors of Workers AI (tests/error_table.py)"
MODULES = (
    shared.errors,
    shared.store,
    services.gateway.http.errors,
    services.gateway.nats_api.errors,
    services.gateway.dialects.prefixes.errors,
    services.gateway.dialects.responses.storage.errors,
    services.gateway.tenancy.errors,
    services.gateway.dialects.workers_ai.errors,
    services.gateway.dialects.workers_ai.model_id,
    shared.tenancy.pinned_prefix,
)
MEANING = {
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
    "limit_is_zero": "requests are disabled for this tenant by a limit of 0",
    "model_not_allowed": "the tenant may not use this model",
    "no_region_allowed": "the tenant's data may be in no region",
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
    "device_failed": "the device of a worker failed (between processes)",
    "deadline_exceeded": "the request took longer than `--request-timeout-s`",
}
# raised at startup, never in a response
STARTUP_ONLY = {"config_error", "checkpoint_error", "name_in_use"}


def error_classes() -> list[type[HearthError]]:
    """Every class of the modules whose code can occur in a response."""
    modules = {module.__name__ for module in MODULES}
    found = [each for each in _descendants(HearthError) if each.__module__ in modules]
    return [each for each in found if each.code not in STARTUP_ONLY]


def _descendants(root: type[HearthError]) -> Iterator[type[HearthError]]:
    yield root
    for child in root.__subclasses__():
        yield from _descendants(child)


def table() -> str:
    """The Markdown table, sorted by status, then as MEANING: not by the order of imports. Raises
    KeyError for a code without a meaning.
    """
    order = {code: place for place, code in enumerate(MEANING)}
    lines = ["| status | `code` | `type` | meaning |", "| --- | --- | --- | --- |"]
    rows = [(each.http_status, each.code, each.openai_type) for each in error_classes()]
    for status, code, kind in sorted(rows, key=lambda row: (row[0], order[row[1]])):
        lines.append(f"| {status} | `{code}` | `{kind}` | {MEANING[code]} |")
    return "\n".join(lines) + "\n"


def workers_ai_table() -> str:
    """The codes of the first table by their number and status in Cloudflare's envelope."""
    lines = ["| number | status | `code` of OpenAI's envelope |", "| --- | --- | --- |"]
    codes: dict[tuple[int, int], list[str]] = {}
    for each in error_classes():
        number = number_of(each)
        codes.setdefault((number.code, number.status), []).append(f"`{each.code}`")
    for (number, status), names in sorted(codes.items()):
        lines.append(f"| {number} | {status} | {', '.join(dict.fromkeys(sorted(names)))} |")
    return "\n".join(lines) + "\n"


def written() -> dict[Path, str]:
    """Pages with the current tables."""
    api, workers_ai = DIALECTS / "API.md", DIALECTS / "workers_ai" / "API.md"
    return {
        api: replaced(api.read_text(), MARKER, table()),
        workers_ai: replaced(workers_ai.read_text(), WORKERS_AI_MARKER, workers_ai_table()),
    }


def main() -> None:
    if "--write" in sys.argv:
        for path, text in written().items():
            path.write_text(text)
    else:
        print(table())
        print(workers_ai_table())


if __name__ == "__main__":
    main()
