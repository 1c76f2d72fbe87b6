"""Compares a receipt with that of the same request, computed again under the same salt. No I/O."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import structs

from services.cli.verify.finding import Finding
from services.cli.verify.offline import numerics_of
from shared.receipts.receipt import AnswerReceipt, PromptReceipt

ENDED = ("stop", "length", "tool_calls")  # other outcomes are errors: the answer was cut somewhere


def replay_finding(receipt: AnswerReceipt, again: AnswerReceipt) -> Finding:
    """Says whether the answer is the same, or why that cannot be said."""
    for text in _unlike(receipt, again):
        return Finding("replay", "open", f"not compared: {text}")
    for text in _other_request(receipt, again):
        return Finding("replay", "wrong", text)
    return _answers(receipt, again)


def _unlike(receipt: AnswerReceipt, again: AnswerReceipt) -> Iterator[str]:
    if receipt.model.weights != again.model.weights:
        yield f"this cluster has weights {again.model.weights}, not {receipt.model.weights}"
    before, now = numerics_of(receipt), numerics_of(again)
    if len(before) != 1 or not before[0]:
        yield f"workers with numerics {' and '.join(before) or 'unknown'} made the answer"
    elif now != before:
        yield f"this cluster has numerics {' and '.join(now)}, the receipt {before[0]}"
    cut = {each.outcome for prompt in receipt.prompts for each in prompt.choices}.difference(ENDED)
    if cut:
        yield f"the answer was cut: {', '.join(sorted(cut))}"


def _other_request(receipt: AnswerReceipt, again: AnswerReceipt) -> Iterator[str]:
    if len(receipt.prompts) != len(again.prompts):
        yield f"the request has {len(again.prompts)} prompts, the receipt {len(receipt.prompts)}"
        return
    for index, (one, other) in enumerate(zip(receipt.prompts, again.prompts, strict=True)):
        if one.prompt != other.prompt:
            yield f"prompt {index} of the request is not that of the receipt"
        for name, value in structs.asdict(one.sampling).items():
            given = getattr(other.sampling, name)
            if given != value:
                shown = "" if name == "constraints" else f": {given}, in the receipt {value}"
                yield f"{name} of the request differs{shown}"


def _answers(receipt: AnswerReceipt, again: AnswerReceipt) -> Finding:
    num_choices = sum(len(each.choices) for each in receipt.prompts)
    pairs = list(zip(receipt.prompts, again.prompts, strict=True))
    different = [
        index for index, (one, other) in enumerate(pairs) if _hashes(one) != _hashes(other)
    ]
    if not different:
        num_tokens = sum(each.num_tokens for p in receipt.prompts for each in p.choices)
        text = f"the same answer: {num_tokens} tokens of {num_choices} choices"
        return Finding("replay", "ok", text)
    if numerics_of(receipt)[0].startswith("fast/"):
        return Finding("replay", "open", "another answer, which the fast mode allows")
    return Finding("replay", "wrong", f"another answer to prompt {different[0]}")


def _hashes(prompt: PromptReceipt) -> list[tuple[int, str]]:
    return [(each.num_tokens, each.tokens) for each in prompt.choices]
