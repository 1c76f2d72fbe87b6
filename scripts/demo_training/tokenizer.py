"""The byte-level BPE tokenizer of the demo model."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from demo_training.chat_format import SPECIALS, TOOL_SPECIALS
from demo_training.corpus import Corpus
from demo_training.words import WORDS


def train_tokenizer(corpus: Corpus, vocabulary: int) -> Tokenizer:
    """Trains byte-level BPE; all 256 bytes are in the vocabulary, so any text can be encoded.

    The tokens of tools are the last ids; they do not move those of text.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary - len(TOOL_SPECIALS),
        special_tokens=special_tokens(SPECIALS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    lower = [unit.turns[0][0].lower() for unit in corpus.questions]
    tokenizer.train_from_iterator([*corpus.texts(), *lower, WORDS.everyday()], trainer)
    tokenizer.add_special_tokens(special_tokens(TOOL_SPECIALS))
    return tokenizer


def special_tokens(names: tuple[str, ...]) -> list[AddedToken]:
    """Returns tokens that text never contains."""
    return [AddedToken(name, special=True, normalized=False) for name in names]


def special_id(tokenizer: Tokenizer, name: str) -> int:
    """Returns the id of a special token."""
    number = tokenizer.token_to_id(name)
    assert number is not None, f"the tokenizer lacks {name}"
    return number
