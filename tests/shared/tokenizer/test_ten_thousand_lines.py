"""10,000 lines in 20 scripts have tiktoken's own ids; once in a long run.

Words are drawn from all letters, marks and digits that Unicode has of a script; English, markup and
code are Python's own documentation. Messages of the programs installed here come on top.
"""

from __future__ import annotations

import base64
import gettext
import random
import sys
import unicodedata
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from pydoc_data.topics import topics

import pytest
import tiktoken
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

from shared.tokenizer.tiktoken_model import KIMI, byte_characters
from shared.tokenizer.tokenizer_file import tokenizer_file
from tests.shared.tokenizer.test_tokenizer_file import LINES, environ, write_config

SCRIPTS = (  # as names of characters begin
    *("LATIN", "GREEK", "CYRILLIC", "ARMENIAN", "GEORGIAN", "HEBREW", "ARABIC", "DEVANAGARI"),
    *("BENGALI", "GUJARATI", "TAMIL", "TELUGU", "KANNADA", "MALAYALAM", "THAI", "LAO"),
    *("ETHIOPIC", "KHMER", "HANGUL SYLLABLE", "CJK UNIFIED"),
)
LINES_PER_SCRIPT, NUM_DOCUMENTED = 400, 2000
MARKS = "".join(map(chr, range(0x300, 0x318)))  # combine with letters of any script
ENDINGS = (
    "",
    "",
    "",
    "'s",
    "'LL",
    "\u2019t",
    "...",
    ",",
    " -",
    "!?\n",
    "\r\n\r\n",
    "\t",
    "  ",
    "\u3000",
)
VOCABULARY = 8000
CATALOGS = Path("/usr/share/locale")


def characters() -> dict[str, list[str]]:
    """Letters, marks and numbers of each script."""
    found: dict[str, list[str]] = {script: [] for script in SCRIPTS}
    for character in map(chr, range(sys.maxunicode + 1)):
        if unicodedata.category(character)[0] in "LMN":
            name = unicodedata.name(character, "")
            for script in SCRIPTS:
                if name.startswith(script):
                    found[script].append(character)
    return found


def words(alphabet: list[str], draw: random.Random) -> Iterator[str]:
    """A few letters of a script are most of a text: each line has its own."""
    frequent = draw.choices(alphabet, k=24)
    for _ in range(draw.randrange(1, 14)):
        word = "".join(draw.choices(frequent, k=draw.randrange(1, 9)))
        match draw.randrange(9):
            case 0:
                word = draw.choice(alphabet) + draw.choice(MARKS) + word
            case 1:
                word = word[:1].upper() + word[1:]
            case 2:
                word += str(draw.randrange(10**6)) + word[:2]
            case 3:
                word += draw.choice(("Http", "URL", "x", "_", "(", "£", "\U0001f600"))
        yield word + draw.choice(ENDINGS)


def lines() -> list[str]:
    draw = random.Random(7)
    alphabets = characters()
    generated = [
        " ".join(words(alphabets[script], draw))
        for script in SCRIPTS
        for _ in range(LINES_PER_SCRIPT)
    ]
    text = "".join(topics[name] for name in sorted(topics))
    documented = [line for line in text.splitlines(keepends=True) if line.strip()]
    return [*generated, *draw.sample(documented, NUM_DOCUMENTED)]


def messages(num_per_catalog: int) -> Iterator[str]:
    """Translations into the languages of this machine."""
    for path in sorted(CATALOGS.glob("*/LC_MESSAGES/*.mo")):
        with path.open("rb") as file:
            try:
                catalog = vars(gettext.GNUTranslations(file))["_catalog"]
            except (OSError, LookupError, ValueError):
                continue  # damaged, or in another encoding
        yield from islice((text for text in catalog.values() if text), num_per_catalog)


def trained_ranks(texts: list[str]) -> dict[bytes, int]:
    """A vocabulary of common parts of the texts, by the order of their merges."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(KIMI), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        initial_alphabet=list(byte_characters()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    by_id = sorted(tokenizer.get_vocab().items(), key=lambda each: each[1])
    byte_of = byte_characters()
    tokens = dict.fromkeys(bytes(byte_of[char] for char in text) for text, _ in by_id)
    return {token: rank for rank, token in enumerate(tokens)}


@pytest.mark.long
def test_ids_are_those_of_tiktoken(tmp_path: Path) -> None:
    texts = lines()
    assert len(texts) == len(SCRIPTS) * LINES_PER_SCRIPT + NUM_DOCUMENTED == 10_000
    ranks = trained_ranks([*LINES, *texts[::2]])  # the other half has words that are new to it
    assert len(ranks) == VOCABULARY
    model = b"".join(base64.b64encode(token) + b" %d\n" % rank for token, rank in ranks.items())
    (tmp_path / "tiktoken.model").write_bytes(model)
    write_config(tmp_path, len(ranks))
    tokenizer = Tokenizer.from_file(str(tokenizer_file(tmp_path, environ(tmp_path))))
    own = tiktoken.Encoding("kimi", pat_str=KIMI, mergeable_ranks=ranks, special_tokens={})
    for line in (*texts, *messages(20)):
        ids = tokenizer.encode(line).ids
        assert ids == own.encode_ordinary(line), line
        assert tokenizer.decode(ids) == line
