"""The tables of errors in the pages of the API, generated from the error classes.

python -m tests.error_table            print the tables
python -m tests.error_table --write    put them into the API.md of services/gateway/dialects
"""

from __future__ import annotations

import sys
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
import shared.tenancy.prefixes.pinned_prefix
from benchmarks.readme_table import replaced
from services.gateway.dialects.workers_ai.errors import number_of
from services.gateway.reference.error_meanings import MEANING, descendants
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
    shared.tenancy.prefixes.pinned_prefix,
)
# raised at startup, never in a response
STARTUP_ONLY = {"config_error", "checkpoint_error", "name_in_use"}


def error_classes() -> list[type[HearthError]]:
    """Every class of the modules whose code can occur in a response."""
    modules = {module.__name__ for module in MODULES}
    found = [each for each in descendants(HearthError) if each.__module__ in modules]
    return [each for each in found if each.code not in STARTUP_ONLY]


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
