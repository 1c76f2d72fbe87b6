"""The score of a checkpoint: how many answers match exactly, per kind of question."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from demo_training.cases import Case, chat, conversation_cases, long_cases, question_cases
from demo_training.corpus import Corpus

MAX_NEW_TOKENS = 96
ROWS = 64  # prompts that are answered together
LONG_PROMPT = 1000  # from this number of tokens on, a batch has one prompt, to save memory

Prompt = tuple[int, list[int]]  # the index of its case, and token ids


def load_checkpoint(folder: Path) -> tuple[Any, Any]:
    """Load model and tokenizer with transformers, which training does not need."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    return model, AutoTokenizer.from_pretrained(folder)


def prompt_batches(tokenizer: Any, cases: list[Case]) -> Iterator[list[Prompt]]:
    """Yield the prompts of all cases in batches of equal length, so that none needs padding."""
    prompts: dict[int, list[Prompt]] = {}
    for index, case in enumerate(cases):
        text = tokenizer.apply_chat_template(
            list(case.messages), add_generation_prompt=True, tokenize=False
        )
        ids = tokenizer.encode(text, add_special_tokens=False)
        prompts.setdefault(len(ids), []).append((index, ids))
    for length, group in prompts.items():
        rows = ROWS if length < LONG_PROMPT else 1
        for start in range(0, len(group), rows):
            yield group[start : start + rows]


@torch.inference_mode()
def generate(model: Any, tokenizer: Any, cases: list[Case]) -> list[str]:
    """Answer every case with greedy decoding."""
    outputs = [""] * len(cases)
    for prompts in prompt_batches(tokenizer, cases):
        batch = torch.tensor([ids for _, ids in prompts])  # [B, T]
        mask = torch.ones_like(batch)
        result = model.generate(
            batch, attention_mask=mask, max_new_tokens=MAX_NEW_TOKENS, do_sample=False
        )
        for (index, _), ids in zip(prompts, result[:, batch.shape[1] :], strict=True):
            outputs[index] = tokenizer.decode(ids, skip_special_tokens=True).strip()
    return outputs


def evaluate(
    folder: Path, corpus: Corpus, held_out: list[tuple[str, str]], *, show_misses: bool
) -> None:
    """Print the score of the BF16 checkpoint; `held_out` has (question, answer) pairs."""
    model, tokenizer = load_checkpoint(folder)
    groups = {
        "trained questions": question_cases(corpus),
        "held-out paraphrases": [Case(chat(q), a) for q, a in held_out],
        "conversation turns": conversation_cases(corpus),
        "after 2,000 tokens": long_cases(corpus, tokenizer, 2000, 18),
        "after 8,000 tokens": long_cases(corpus, tokenizer, 8000, 18),
    }
    known = {answer.strip() for answer in corpus.answers.values()}
    known |= {answer for unit in corpus.conversations for _, answer in unit.turns}
    for name, cases in groups.items():
        outputs = generate(model, tokenizer, cases)
        misses = [(c, o) for c, o in zip(cases, outputs, strict=True) if o != c.answer.strip()]
        num_strange = sum(output not in known for output in outputs)
        print_score(name, len(cases), len(misses), num_strange)
        if show_misses:
            print_misses(misses)


def print_score(name: str, num_cases: int, num_misses: int, num_strange: int) -> None:
    """Print the line of one group; a strange answer is not in the corpus."""
    right = num_cases - num_misses
    print(
        f"{name:22} {right:5}/{num_cases:<5} {100 * right / num_cases:6.2f}% exact, "
        f"{num_strange} answers that are not in the corpus",
        flush=True,
    )


def print_misses(misses: list[tuple[Case, str]]) -> None:
    """Print the question, the expected answer and the output of each miss."""
    for case, output in misses:
        print(f"  asked    {case.messages[-1]['content'][-160:]!r}")
        print(f"  expected {case.answer!r}\n  got      {output!r}\n")
