"""JSONSchemaBench: what share of real schemas is refused, and whether masks accept what is valid.

Given a clone of github.com/guidance-ai/jsonschemabench: each file of `maskbench/data` has a schema,
and documents with whether they are valid. No model and no cluster: a document's tokens are fed to
the grammar of its schema. A lenient grammar may accept an invalid document; a strict one must not.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.report import Bar, Row, at_most
from services.cli.cluster.service_options import DEMO_MODEL_DIR
from services.client.load_test import percentile
from services.gateway.structured.grammars.grammar import json_grammar
from services.gateway.text.model_files import ModelFiles
from shared.errors import HearthError
from shared.grammar.matcher import Matcher
from shared.grammar.vocabulary import Vocabulary, load_vocabulary

DATA = "maskbench/data"
EVERY = 4  # one file in so many: about 2,800 schemas
MAX_SHOWN = 10
_VALID = {True: "valid", False: "invalid"}
_ACCEPTED = {True: "accepted", False: "rejected"}


class Document(msgspec.Struct, frozen=True):
    valid: bool
    data: Any


class SchemaFile(msgspec.Struct, frozen=True):
    schema: Any
    tests: list[Document] = []


async def measure(clone: Path) -> tuple[list[Row], list[Bar]]:
    files = ModelFiles(DEMO_MODEL_DIR)
    vocabulary = load_vocabulary(DEMO_MODEL_DIR, vocab_size=None, eos_token_ids=files.end_token_ids)
    paths = sorted((clone / DATA).glob("*.json"))[::EVERY]
    rows = [_row(vocabulary, paths, is_strict=strict) for strict in (True, False)]
    strict, lenient = rows
    return rows, [
        at_most("strict: schemas refused", strict["refused"], 0.16, ""),
        at_most("lenient: schemas refused", lenient["refused"], 0.015, ""),
        at_most("strict: invalid documents accepted", strict["invalid accepted"], 0, "documents"),
    ]


def _row(vocabulary: Vocabulary, paths: list[Path], *, is_strict: bool) -> Row:
    counts: Counter[str] = Counter()
    compile_ms = []
    for path in paths:
        try:
            given = msgspec.json.decode(path.read_bytes(), type=SchemaFile)
        except msgspec.DecodeError:
            counts["unreadable"] += 1
            continue
        began = time.perf_counter()
        matcher = _compiled(vocabulary, given.schema, is_strict=is_strict)
        if matcher is None:
            counts["refused"] += 1
            continue
        compile_ms.append((time.perf_counter() - began) * 1e3)
        for document in given.tests:
            is_accepted = _accepts(vocabulary, matcher.copy(), document.data)
            found = f"{_VALID[document.valid]} {_ACCEPTED[is_accepted]}"
            counts[found] += 1
            if is_strict and is_accepted != document.valid and counts["shown"] < MAX_SHOWN:
                counts["shown"] += 1
                print(f"{found}: {path.name}: {str(document.data)[:200]}", flush=True)
    num_read = len(paths) - counts["unreadable"]
    return {
        "case": "strict" if is_strict else "lenient",
        "schemas": num_read,
        "refused": counts["refused"] / max(1, num_read),
        **{name: counts[name] for name in ("valid accepted", "valid rejected")},
        **{name: counts[name] for name in ("invalid accepted", "invalid rejected")},
        "compile p50 ms": statistics.median(compile_ms),
        "compile p99 ms": percentile(compile_ms, 99),
    }


def _compiled(vocabulary: Vocabulary, schema: Any, *, is_strict: bool) -> Matcher | None:
    """Returns the matcher of a schema, or None if the schema is refused."""
    if schema is False:
        return None
    grammar = json_grammar(schema, is_strict=is_strict)
    try:
        matcher = vocabulary.compile(grammar.kind, grammar.source)
        matcher.fill()
    except HearthError:
        return None
    return matcher


def _accepts(vocabulary: Vocabulary, matcher: Matcher, document: Any) -> bool:
    token_ids = vocabulary.encode(msgspec.json.encode(document).decode())
    try:
        return matcher.accept(token_ids) == len(token_ids) and matcher.is_accepting
    except HearthError:
        return False
