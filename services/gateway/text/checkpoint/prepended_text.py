"""Recognises tokenizers that write a space before a text, as SentencePiece: `a` becomes `▁a`."""

from __future__ import annotations

from shared.tokenizer.tokenizer_steps import Step, TokenizerSteps, flattened


def prepends_text(steps: TokenizerSteps) -> bool:
    """Whether two parts of a text, encoded apart, may get characters that it does not have."""
    return any(map(_prepends, (*flattened(steps.normalizer), *flattened(steps.pre_tokenizer))))


def _prepends(step: Step) -> bool:
    match step.get("type"):
        case "Prepend":
            return True
        case "Metaspace":
            return step.get("prepend_scheme", "always") != "never"
        case "ByteLevel":
            return bool(step.get("add_prefix_space", True))
        case _:
            return False
