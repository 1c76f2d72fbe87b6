"""Greedy answers of the demo model on a full cluster: trained and held-out questions."""

from __future__ import annotations

import asyncio
import string
import tomllib
from pathlib import Path

import httpx
import pytest

from tests.support.cluster.hearth_up import Cluster

CORPUS = Path(__file__).resolve().parents[2] / "scripts" / "demo_corpus"
MAX_CONCURRENT = 48


def pairs(topic: str) -> list[dict]:
    """The pairs of one file. Ids are unique within a file only."""
    return tomllib.loads((CORPUS / f"{topic}.toml").read_text())["pair"]


def held_out() -> list[tuple[str, str]]:
    """Tuples of a question and the answer of the trained pair that it paraphrases."""
    found = []
    for path in sorted(CORPUS.glob("held_out_*.toml")):
        if path.stem == "held_out_tools":
            continue
        answer_of = {p["id"]: p["answer"] for p in pairs(path.stem.removeprefix("held_out_"))}
        for paraphrase in tomllib.loads(path.read_text())["paraphrase"]:
            found.append((paraphrase["question"], answer_of[paraphrase["id"]]))
    return found


def trained() -> list[tuple[str, str]]:
    stems = (p.stem for p in CORPUS.glob("*.toml"))
    topics = sorted(stem for stem in stems if stem != "tools" and not stem.startswith("held_out_"))
    found = [(q, pair["answer"]) for t in topics for pair in pairs(t) for q in pair["questions"]]
    assert len(found) == len({question for question, _ in found}), "a question with two answers"
    return found


def answers(cluster: Cluster, questions: list[str]) -> list[str]:
    """Greedy answers in the order of the questions, requested concurrently."""

    async def request_all() -> list[str]:
        limit = asyncio.Semaphore(MAX_CONCURRENT)
        model = cluster.model
        headers = {"Authorization": f"Bearer {cluster.state.api_key}"}

        async def request_one(client: httpx.AsyncClient, question: str) -> str:
            body = {
                "model": model,
                "messages": [{"role": "user", "content": question}],
                "temperature": 0,
                "max_tokens": 120,
            }
            async with limit:
                response = await client.post("/v1/chat/completions", json=body)
            assert response.status_code == 200, response.text
            return response.json()["choices"][0]["message"]["content"].strip()

        async with httpx.AsyncClient(base_url=cluster.url, headers=headers, timeout=300) as client:
            return await asyncio.gather(*(request_one(client, question) for question in questions))

    return asyncio.run(request_all())


def share_correct(cluster: Cluster, expected: list[tuple[str, str]]) -> tuple[float, list[str]]:
    actual = answers(cluster, [question for question, _ in expected])
    wrong = [
        f"{question!r}: {answer!r}"
        for (question, correct), answer in zip(expected, actual, strict=True)
        if answer != correct
    ]
    return 1 - len(wrong) / len(expected), wrong


@pytest.mark.parametrize(
    "stride",
    [pytest.param(1, marks=pytest.mark.long, id="all"), pytest.param(45, id="every 45th")],
)
def test_trained_questions_are_answered_correctly(cluster, stride):
    questions = trained()[::stride]
    share, wrong = share_correct(cluster, questions)
    print(f"{share:.1%} of {len(questions)} trained questions")
    assert share >= 0.95, wrong


@pytest.mark.parametrize(
    "stride",
    [pytest.param(1, marks=pytest.mark.long, id="all"), pytest.param(3, id="every 3rd")],
)
def test_held_out_paraphrases_are_answered_correctly(cluster, stride):
    assert len(held_out()) == 100
    share, wrong = share_correct(cluster, held_out()[::stride])
    print(f"{share:.1%} of the held-out paraphrases")
    assert share >= 0.70, wrong


def test_no_held_out_question_was_trained():
    def key(question: str) -> str:
        return question.lower().strip(string.punctuation + " ")

    assert not {key(q) for q, _ in trained()} & {key(q) for q, _ in held_out()}


@pytest.mark.parametrize(
    "question", ["", "asdf qwer", "Who won the cup in 1974?", "What is a piano?", "Why?"]
)
def test_other_questions_get_sentences(cluster, question):
    (answer,) = answers(cluster, [question])
    assert answer.endswith((".", "!", "?"))
    words = answer.split()
    assert len(words) >= 3 and all(word.isascii() for word in words)
