"""What the demo model that sees is trained on, and its optimizer."""

from __future__ import annotations

import jinja2
import torch

from demo_vision_training.batches import MAX_TURNS, batch_of
from demo_vision_training.muon import orthogonal
from demo_vision_training.questions import KINDS, Case, case
from demo_vision_training.text import (
    CHAT_TEMPLATE,
    IMAGE,
    PLACEHOLDER,
    parts_of,
    prompt_of,
    train_tokenizer,
)


def rendered(each: Case) -> str:
    """Returns the conversation as the checkpoint's own template writes it."""
    images = [{"type": "image"}] * len(each.images)
    messages = []
    for number, (question, answer) in enumerate(each.turns):
        asked = [*(images if number == 0 else []), {"type": "text", "text": question}]
        messages.append({"role": "user", "content": asked})
        messages.append({"role": "assistant", "content": [{"type": "text", "text": answer}]})
    text = jinja2.Template(CHAT_TEMPLATE).render(messages=messages)
    return text.replace(IMAGE, PLACEHOLDER)


def test_conversations_are_those_of_the_chat_template() -> None:
    for number, kind in enumerate(KINDS):
        each = case(number, kind)
        parts = parts_of(each)
        assert parts[0][0] == prompt_of(each)
        assert "".join(map("".join, parts)) + "\n" == rendered(each)


def test_answers_alone_are_learned() -> None:
    tokenizer = train_tokenizer(num_cases=60)
    cases = [case(number, "where") for number in range(3)]
    batch = batch_of(cases, tokenizer)
    for each, token_ids, labels in zip(cases, batch.token_ids, batch.labels, strict=True):
        learned = token_ids[labels >= 0]
        assert torch.equal(learned, labels[labels >= 0])
        answers = [f" {answer}" for _, answer in each.turns[:MAX_TURNS]]
        assert tokenizer.decode(learned.tolist()) == "".join(answers)
    asked = batch_of(cases, tokenizer, has_answers=False)
    assert (asked.labels < 0).all()
    text = tokenizer.decode(asked.token_ids[0].tolist(), skip_special_tokens=False)
    assert text.endswith(prompt_of(cases[0]))


def test_directions_of_muon_have_singular_values_near_one() -> None:
    generator = torch.Generator().manual_seed(1)
    for shape in ((6, 9), (9, 6), (5, 5)):
        values = torch.linalg.svdvals(orthogonal(torch.randn(shape, generator=generator)))
        assert values.min() > 0.5
        assert values.max() < 1.3
