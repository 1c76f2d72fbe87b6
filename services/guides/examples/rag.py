"""Answers a question from files, or from the texts below.

    python rag.py MODEL QUESTION [TEXT_FILE ...]

Embeddings find the candidates, rerank sorts them, and the best ones go into the prompt. They stand
before the question, so that further questions about the same texts find their KV in the cache.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import openai

NUM_CANDIDATES, NUM_SOURCES = 4, 2
TEXTS = (
    "A prefill worker computes the KV of a prompt and pushes it to a decode worker.",
    "A decode worker reserves blocks first, so that finished KV always has a place.",
    "The gateway owns a request and sends it again if its worker is lost.",
    "The scheduler holds requests in a queue that is fair in tokens between tenants.",
    "The index knows which worker holds which block of KV.",
    "Redis holds tenants, limits and usage, and never the KV itself.",
)


def main(model: str, question: str, *files: str) -> None:
    url, key = os.environ["HEARTH_URL"], os.environ["HEARTH_API_KEY"]
    client = openai.OpenAI(base_url=f"{url}/v1", api_key=key)
    texts = [part for name in files for part in paragraphs(Path(name))] or list(TEXTS)
    sources = reranked(client, model, question, nearest(client, model, question, texts))
    for number, text in enumerate(sources, 1):
        print(f"[{number}] {text}")
    facts = "\n".join(f"[{number}] {text}" for number, text in enumerate(sources, 1))
    messages: list[Any] = [
        {"role": "system", "content": f"Answer from these facts, and name them:\n{facts}"},
        {"role": "user", "content": question},
    ]
    stream = client.chat.completions.create(
        model=model, messages=messages, max_tokens=200, stream=True
    )
    for chunk in stream:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    print()


def paragraphs(path: Path) -> list[str]:
    return [part for each in path.read_text().split("\n\n") if (part := " ".join(each.split()))]


def nearest(client: openai.OpenAI, model: str, question: str, texts: list[str]) -> list[str]:
    """Returns the texts with the largest cosine. Embeddings have length 1: it is their product."""
    found = client.embeddings.create(model=model, input=[question, *texts]).data
    first, *others = (each.embedding for each in found)
    scores = [sum(a * b for a, b in zip(first, each, strict=True)) for each in others]
    ranked = sorted(zip(scores, texts, strict=True), reverse=True)
    return [text for _, text in ranked[:NUM_CANDIDATES]]


def reranked(client: openai.OpenAI, model: str, question: str, texts: list[str]) -> list[str]:
    body = {"model": model, "query": question, "documents": texts, "top_n": NUM_SOURCES}
    response: Any = client.post("/rerank", body=body, cast_to=dict[str, Any])
    return [texts[each["index"]] for each in response["results"]]


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
