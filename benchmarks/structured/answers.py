"""Whether constrained answers are valid: 1,000 schemas, by models that want something else.

A request is strict; if that is refused, its lenient form is sent. Only answers that ended by `stop`
under a grammar that enforces all of the schema must be valid, by a validator that shares no code
with the grammars. `least probable` is the demo model with the opposite of its logits, greedy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.report import Bar, Row, at_least, at_most
from benchmarks.structured.cluster import Answer, Body, Served, at_most_at_once, served
from benchmarks.structured.models import write_negated_demo_model, write_small_random_model
from services.cli.cluster.service_options import DEMO_MODEL_DIR
from tests.support.corpora.documents import is_valid
from tests.support.corpora.json_schemas import SchemaCase, schema_case

NUM_AT_ONCE = 16
MAX_TOKENS = {True: 2048, False: 256}  # key: whether the document is bounded
STREAMED_EVERY = 20  # one in so many requests is also sent as a stream
MAX_SHOWN = 5


@dataclass(frozen=True)
class Sampling:
    """A model and its temperature. If `is_run`, requests use Workers AI's `ai/run`, which allows
    temperatures up to 5.
    """

    name: str
    model: str
    temperature: float
    is_run: bool = False


SAMPLINGS = (
    Sampling("demo, greedy", "demo", 0),
    Sampling("demo, T = 1", "demo", 1),
    Sampling("demo, T = 2", "demo", 2),
    Sampling("demo, T = 5", "demo", 5, is_run=True),
    Sampling("least probable", "negated", 0),
    Sampling("random, T = 1", "random", 1),
)


async def measure(num_schemas: int) -> tuple[list[Row], list[Bar]]:
    cases = [schema_case(number) for number in range(num_schemas)]
    rows, bars = [], []
    for model in dict.fromkeys(each.model for each in SAMPLINGS):
        async with _model(model) as target:
            for sampling in (each for each in SAMPLINGS if each.model == model):
                row = await _row(target, sampling, cases)
                rows.append(row)
                print(row, flush=True)
    for row in rows:
        ended = row["valid"] + row["invalid"]
        bars.append(at_least(f"{row['case']}: valid", row["valid"] / max(1, ended), 1.0, ""))
        bars.append(at_least(f"{row['case']}: bounded that ended", row["bounded ended"], 0.99, ""))
        bars.append(at_most(f"{row['case']}: other failures", row["failed"], 0, "requests"))
    bars.append(at_most("strict schemas refused", rows[0]["strict refused"], 0.16, ""))
    bars.append(at_most("lenient schemas refused", rows[0]["lenient refused"], 0.015, ""))
    return rows, bars


@asynccontextmanager
async def _model(name: str) -> AsyncIterator[Served]:
    async with AsyncExitStack() as stack:
        model_dir = DEMO_MODEL_DIR
        if name != "demo":
            folder = stack.enter_context(TemporaryDirectory(prefix="hearth-model-"))
            model_dir = Path(folder) / name
            write = write_negated_demo_model if name == "negated" else write_small_random_model
            write(model_dir)
        yield await stack.enter_async_context(served(model_dir))


async def _row(target: Served, sampling: Sampling, cases: list[SchemaCase]) -> Row:
    counts: Counter[str] = Counter()

    async def one(number: int) -> None:
        await _count(target, sampling, cases[number], number, counts)

    await at_most_at_once(NUM_AT_ONCE, range(len(cases)), one)
    bounded = counts["bounded"]
    return {
        "case": sampling.name,
        "requests": len(cases),
        "valid": counts["valid"],
        "invalid": counts["invalid"],
        "length": counts["length"],
        "bounded": bounded,
        "bounded ended": counts["bounded ended"] / max(1, bounded),
        "strict refused": counts["strict refused"] / len(cases),
        "lenient refused": counts["lenient refused"] / len(cases),
        "refused though supported": counts["refused though supported"],
        "lenient valid": counts["lenient valid"],
        "lenient invalid": counts["lenient invalid"],
        "streamed otherwise": counts["streamed otherwise"],
        "failed": counts["failed"] + counts["streamed otherwise"],
    }


async def _count(
    target: Served, sampling: Sampling, case: SchemaCase, number: int, counts: Counter[str]
) -> None:
    body = _body(target, sampling, case, number, is_strict=True)
    answer, kind = await _answer(target, sampling, body), ""
    if answer.status == 400:
        counts["strict refused"] += 1
        if not case.unsupported and not case.is_unreadable:
            counts["refused though supported"] += 1
            _show(sampling, case, f"refused: {answer.text[:300]}", counts)
        body = _body(target, sampling, case, number, is_strict=False)
        answer, kind = await _answer(target, sampling, body), "lenient "
        if answer.status == 400:
            counts["lenient refused"] += 1
            return
    if answer.status != 200:
        counts["failed"] += 1
        _show(sampling, case, f"{answer.status} {answer.text[:300]}", counts)
        return
    counts["bounded"] += case.is_bounded
    if answer.finish_reason != "stop":
        counts["length"] += 1
        if case.is_bounded:
            _show(sampling, case, f"not ended: {answer.text[:300]}", counts)
        return
    counts["bounded ended"] += case.is_bounded
    is_good = is_valid(answer.text, case.schema)
    counts[kind + ("valid" if is_good else "invalid")] += 1
    if not is_good and not kind:
        _show(sampling, case, f"invalid: {answer.text[:300]}", counts)
    if number % STREAMED_EVERY == 0 and not sampling.is_run:
        streamed = await target.stream(body)
        text = streamed.output[0].text if streamed.output else ""
        counts["streamed otherwise"] += text != answer.text


def _body(
    target: Served, sampling: Sampling, case: SchemaCase, number: int, *, is_strict: bool
) -> Body:
    schema = {"name": "answer", "schema": case.schema, "strict": is_strict}
    return target.chat(
        response_format={"type": "json_schema", "json_schema": schema},
        temperature=sampling.temperature,
        seed=number,
        max_tokens=MAX_TOKENS[case.is_bounded],
    )


async def _answer(target: Served, sampling: Sampling, body: Body) -> Answer:
    return await (target.run(body) if sampling.is_run else target.ask(body))


def _show(sampling: Sampling, case: SchemaCase, what: str, counts: Counter[str]) -> None:
    counts["shown"] += 1
    if counts["shown"] <= MAX_SHOWN:
        print(f"{sampling.name}: {case.name}: {what}: {case.schema}", flush=True)
