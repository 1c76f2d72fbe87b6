"""The score of a checkpoint: how many answers match exactly, per kind of question."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from demo_training.cases import Case, chat, conversation_cases, long_cases, question_cases
from demo_training.chat_format import CALL, CALL_END
from demo_training.corpus import Corpus
from demo_training.tool_cases import ToolCase

MAX_NEW_TOKENS = 96
ROWS = 64  # prompts that are answered together
LONG_PROMPT = 1000  # from this number of tokens on, a batch has one prompt, to save memory

Prompt = tuple[int, list[int]]  # the index of its case, and token ids


def load_checkpoint(folder: Path) -> tuple[Any, Any]:
    """Loads model and tokenizer with transformers, which training does not need."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    return model, AutoTokenizer.from_pretrained(folder)


class Asked(Protocol):
    """A chat that ends with a question, with or without tools."""

    def chat(self) -> tuple[list[dict[str, str]], list[dict[str, Any]] | None]:
        """Returns the messages, and the tools of the request."""


def prompt_batches(tokenizer: Any, cases: Sequence[Asked]) -> Iterator[list[Prompt]]:
    """Yields the prompts of all cases in batches of equal length, so that none needs padding."""
    prompts: dict[int, list[Prompt]] = {}
    for index, case in enumerate(cases):
        messages, tools = case.chat()
        text = tokenizer.apply_chat_template(
            messages, tools=tools, add_generation_prompt=True, tokenize=False
        )
        ids = tokenizer.encode(text, add_special_tokens=False)
        prompts.setdefault(len(ids), []).append((index, ids))
    for length, group in prompts.items():
        rows = ROWS if length < LONG_PROMPT else 1
        for start in range(0, len(group), rows):
            yield group[start : start + rows]


@torch.inference_mode()
def generate(model: Any, tokenizer: Any, cases: Sequence[Asked]) -> list[str]:
    """Answers every case with greedy decoding; the tokens of calls are kept in the text."""
    hidden = set(tokenizer.all_special_ids) - set(tokenizer.convert_tokens_to_ids([CALL, CALL_END]))
    outputs = [""] * len(cases)
    for prompts in prompt_batches(tokenizer, cases):
        batch = torch.tensor([ids for _, ids in prompts])  # [B, T]
        mask = torch.ones_like(batch)
        result = model.generate(
            batch, attention_mask=mask, max_new_tokens=MAX_NEW_TOKENS, do_sample=False
        )
        for (index, _), ids in zip(prompts, result[:, batch.shape[1] :], strict=True):
            shown = [number for number in ids.tolist() if number not in hidden]
            outputs[index] = tokenizer.decode(shown).strip()
    return outputs


def evaluate(
    folder: Path, corpus: Corpus, held_out: list[tuple[str, str]], *, show_misses: bool
) -> None:
    """Prints the score of the BF16 checkpoint; `held_out` has (question, answer) pairs."""
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


def evaluate_tools(folder: Path, groups: dict[str, list[ToolCase]], *, show_misses: bool) -> None:
    """Prints for each group the share of questions with the right calls or rightly none."""
    model, tokenizer = load_checkpoint(folder)
    for name, cases in groups.items():
        outputs = generate(model, tokenizer, cases)
        scores = [case.score(output) for case, output in zip(cases, outputs, strict=True)]
        names, exact = (sum(column) for column in zip(*scores, strict=True))
        print(
            f"{name:22} {names:5}/{len(cases):<5} {100 * names / len(cases):6.2f}% right tool or "
            f"none, {100 * exact / len(cases):.2f}% also right arguments",
            flush=True,
        )
        for case, output, (_, is_exact) in zip(cases, outputs, scores, strict=True):
            if show_misses and not is_exact:
                offered = " ".join(tool.name for tool in case.tools)
                print(f"  asked    {case.question!r} with {offered}")
                print(f"  expected {case.calls}\n  got      {output!r}\n")


def print_score(name: str, num_cases: int, num_misses: int, num_strange: int) -> None:
    """Prints the line of one group; a strange answer is not in the corpus."""
    right = num_cases - num_misses
    print(
        f"{name:22} {right:5}/{num_cases:<5} {100 * right / num_cases:6.2f}% exact, "
        f"{num_strange} answers that are not in the corpus",
        flush=True,
    )


def print_misses(misses: list[tuple[Case, str]]) -> None:
    """Prints the question, the expected answer and the output of each miss."""
    for case, output in misses:
        print(f"  asked    {case.messages[-1]['content'][-160:]!r}")
        print(f"  expected {case.answer!r}\n  got      {output!r}\n")
