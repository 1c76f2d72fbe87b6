"""Converts prompt parts to token ids."""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from itertools import product

import msgspec
from tokenizers import AddedToken, Tokenizer

from services.gateway.text.chat_template import LiteralText
from services.gateway.text.checkpoint.prepended_text import prepends_text
from services.gateway.text.checkpoint.tokenizer_costs import (
    MAX_TOKEN_IDS,
    check_steps,
    has_known_cost,
    most_chars_of_one,
)
from services.gateway.text.decoding.packed_texts import packed
from services.gateway.text.decoding.token_bytes import complete_texts, is_byte_level
from services.gateway.text.decoding.token_table import TokenTable
from services.gateway.text.process_jobs import Encoded, EncodeJob
from services.gateway.text.tiktoken_bpe import MAX_CHARS, encoders
from services.gateway.text.token_bounds import longest_token_chars
from shared.errors import ConfigError
from shared.tokenizer import tiktoken_model
from shared.tokenizer.tokenizer_steps import read_steps
from shared.tokenizer.tokenizer_text import vocabulary

# Models write this before and after a marker, and one token may hold both.
_AROUND = tuple(product(("", " ", "\n", "\n\n", ".", ".\n", ".\n\n"), ("", "\n", "\n\n")))
MAX_SLOW_CHARS = 64 << 10  # normalized, of the library's own encoding: some 30 ms
_MARKER = re.compile(r"[<\[]\S*\w\S*[>\]]")


class PromptTokenizer:
    """Two views of one `tokenizer.json`: special tokens recognized, or ordinary characters.

    `markers`: the added tokens which are not special but which the chat template writes or looks
    for, such as `<tool_call>` or `</think>`; they are ordinary characters too in the second view.
    `max_known_chars`: of a text that takes a known time, linear in it.

    Of a vocabulary of 150,000 tokens, the library's parse lets no other thread run for 0.5 s, so
    the gateway's own process makes none, and has its `TokenTable`.
    """

    def __init__(self, text: str, chat_template: str = "", *, place: str = "") -> None:
        """`text`: of a `tokenizer.json`. Raises ConfigError, which names the `place` that it is
        from, for one that cannot be read.
        """
        try:
            self._load(text, chat_template)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # tokenizers raises a bare Exception; its panic is none
            raise ConfigError(f"cannot read the tokenizer of {place}: {error}") from error

    def _load(self, text: str, chat_template: str) -> None:
        self.tokenizer = Tokenizer.from_str(text)
        self.markers = _markers(self.tokenizer, chat_template)
        self._steps = steps = read_steps(text)
        check_steps(steps)
        self._literal = _literal_of(self.tokenizer, steps.added_tokens, self.markers)
        vocab = vocabulary(text)
        added = self.tokenizer.get_added_tokens_decoder()
        self._added_ids = {each.content: token_id for token_id, each in added.items()}
        self.longest_token_chars = longest_token_chars(steps, (*vocab, *self._added_ids))
        most_slow = 0
        if is_known := has_known_cost(steps):
            most_slow = MAX_SLOW_CHARS // most_chars_of_one(steps)
        self._prepends = prepends_text(steps)
        self.tokenizer.no_padding()
        self.tokenizer.no_truncation()
        # The cache speeds up known words of any tenant, so timing would leak the words of others.
        # Without the cache, encoding takes as long as with all words cached.
        self.tokenizer.model._resize_cache(0)
        if self._prepends:
            self._begin = f"<{secrets.token_hex(16)}>"  # no client can know it
            self._literal.add_tokens([AddedToken(self._begin, normalized=False)])
        self._encode, self._encode_literal, is_fast = encoders(
            text, steps, vocab, self.tokenizer, self._literal
        )
        self.max_known_chars = MAX_CHARS if is_fast and is_known else most_slow
        self._added = _added_around(self.tokenizer)

    @property
    def special_tokens(self) -> list[str]:
        added = self.tokenizer.get_added_tokens_decoder().values()
        return [token.content for token in added if token.special]

    @property
    def num_added_around(self) -> int:
        """The number of tokens that the tokenizer adds before and after any prompt."""
        return sum(map(len, self._added))

    def added_token_id(self, text: str) -> int | None:
        """Returns the token that stands for this text alone, such as a marker of a template."""
        return self._added_ids.get(text)

    def spellings(self, text: str) -> tuple[tuple[int, ...], ...]:
        """Returns the token sequences that spell this text in an output, that of the text alone
        first. The outer tokens of a text that is no added token may also hold spaces or a full
        stop.
        """
        added = self.added_token_id(text)
        if added is not None:
            return ((added,),)
        found = [self._spelling(before, text, after) for before, after in _AROUND]
        return tuple(dict.fromkeys(found))

    def _spelling(self, before: str, text: str, after: str) -> tuple[int, ...]:
        """Returns the tokens that hold a part of `text`."""
        full = before + text + after
        token_ids, starts = self.encode_with_offsets(full, add_special_tokens=False)
        begin, end = len(before), len(before) + len(text)
        return tuple(
            token_id
            for token_id, first, last in zip(
                token_ids, starts, [*starts[1:], len(full)], strict=True
            )
            if first < end and (first >= begin or last > begin)
        )

    def encode(self, parts: Sequence[str]) -> list[int]:
        """Encodes without adding tokens: a chat template includes the BOS token."""
        if self._prepends and len(parts) > 1:
            return self._encode_runs(parts)
        token_ids: list[int] = []
        for part in parts:
            is_literal = isinstance(part, LiteralText)
            token_ids += self._encode_literal(part) if is_literal else self._encode(part)
        return token_ids

    def _encode_runs(self, parts: Sequence[str]) -> list[int]:
        """Encodes the text between two added tokens of the template at once: the tokenizer writes a
        space before each text, and parts are not texts of their own.
        """
        token_ids: list[int] = []
        run = ""
        for part in parts:
            end = 0
            for token_id, (start, next_end) in self._added_in(part):
                token_ids += self._encode_run(run + part[end:start], is_first=not token_ids)
                token_ids.append(token_id)
                run, end = "", next_end
            run += part[end:]
        return token_ids + self._encode_run(run, is_first=not token_ids)

    def _encode_run(self, text: str, *, is_first: bool) -> list[int]:
        if not text:
            return []
        if is_first:
            return self._encode_literal(text)
        return self._encode_literal(self._begin + text)[1:]

    def _added_in(self, part: str) -> list[tuple[int, tuple[int, int]]]:
        """Returns the added tokens of a template's part, and their places."""
        if isinstance(part, LiteralText):
            return []
        found = self.tokenizer.encode(part, add_special_tokens=False)
        return [
            (token_id, (start, end))
            for token_id, (start, end) in zip(found.ids, found.offsets, strict=True)
            if self._added_ids.get(part[start:end].strip()) == token_id  # none for unknown text
        ]

    def encode_with_offsets(
        self, text: str, *, add_special_tokens: bool
    ) -> tuple[list[int], list[int]]:
        """Encodes a client's prompt. Returns token ids and the start of each token in `text`.

        An offset is the end of the previous token, since some tokenizers exclude a token's space
        from its span; all tokens of one character have that character's offset. Offsets never
        decrease: a token that the post-processor appends has the span (0, 0).
        """
        encoding = self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        offsets, first, end = [], 0, 0
        for start, next_end in encoding.offsets:
            first = end if start == next_end else max(first, min(start, end))
            offsets.append(first)
            end = max(end, next_end)
        return encoding.ids, offsets

    def encode_text(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Returns the same ids as `encode_with_offsets`, several times faster for most models."""
        token_ids = self._encode(text)
        if not add_special_tokens:
            return token_ids
        before, after = self._added
        return [*before, *token_ids, *after]

    def table(self) -> TokenTable:
        """Returns what decoding needs. Raises ConfigError for ids that no model has."""
        tokenizer, added = self.tokenizer, self.tokenizer.get_added_tokens_decoder()
        num_ids = 1 + max([*tokenizer.get_vocab().values(), *added], default=-1)
        if num_ids > MAX_TOKEN_IDS:
            raise ConfigError(f"it has a token {num_ids - 1}, the limit is {MAX_TOKEN_IDS - 1}")
        spelled = [tokenizer.id_to_token(token_id) for token_id in range(num_ids)]
        special = {token.content for token in added.values() if token.special}
        special_ids = frozenset(n for n, each in enumerate(spelled) if each in special)
        return TokenTable(
            spellings=packed(spelled),
            complete_texts=complete_texts(self._steps, spelled, added.keys() | special_ids),
            special_ids=special_ids,
            special_tokens=tuple(self.special_tokens),
            added_ids=self._added_ids,
            decoder=msgspec.json.encode(self._steps.decoder),
            is_byte_level=is_byte_level(self._steps),
            vocab_size=int(tokenizer.get_vocab_size(with_added_tokens=True)),
        )


def encoded(job: EncodeJob, tokenizer: PromptTokenizer) -> Encoded:
    """Returns the reply to the job."""
    add = job.adds_special_tokens
    if add is None:
        rendered = [[_part(*each) for each in parts] for parts in job.prompts]
        return Encoded([tokenizer.encode(parts) for parts in rendered], [])
    texts = [text for ((_, text),) in job.prompts]
    if not job.has_offsets:
        return Encoded([tokenizer.encode_text(text, add_special_tokens=add) for text in texts], [])
    pairs = [tokenizer.encode_with_offsets(text, add_special_tokens=add) for text in texts]
    return Encoded([ids for ids, _ in pairs], [offsets for _, offsets in pairs])


def _part(is_literal: bool, text: str) -> str:
    return LiteralText(text) if is_literal else text


def bad_word_texts(word: str) -> tuple[LiteralText, LiteralText]:
    """Returns the word as it is at the start of a text and after a space."""
    bare = word.lstrip()
    return LiteralText(bare), LiteralText(f" {bare}")


def _markers(tokenizer: Tokenizer, chat_template: str) -> tuple[str, ...]:
    """Returns the markers without added tokens that only hold spaces or a tag of HTML: these are
    ordinary text of a client.
    """
    added = tokenizer.get_added_tokens_decoder().values()
    texts = (token.content for token in added if not token.special)
    return tuple(each for each in texts if _MARKER.fullmatch(each) and each in chat_template)


def _literal_of(
    marked: Tokenizer, added: Sequence[tiktoken_model.AddedToken], markers: Sequence[str]
) -> Tokenizer:
    """Encodes special tokens and markers as ordinary characters. It shares the model, and gets the
    same added tokens in the same order: their ids depend on it.
    """
    literal = Tokenizer(marked.model)
    literal.normalizer, literal.pre_tokenizer = marked.normalizer, marked.pre_tokenizer
    literal.add_tokens([_with_special(each, markers) for each in added])
    literal.encode_special_tokens = True
    return literal


def _with_special(token: tiktoken_model.AddedToken, markers: Sequence[str]) -> AddedToken:
    flags = msgspec.structs.asdict(token)
    flags["special"] = token.special or token.content in markers
    return AddedToken(**flags)


def _added_around(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Returns the special tokens that the post-processor writes before and after any text."""
    full = tokenizer.encode("a", add_special_tokens=True)
    own = [index for index, special in enumerate(full.special_tokens_mask) if not special]
    first, last = (own[0], own[-1]) if own else (len(full.ids), len(full.ids))
    return full.ids[:first], full.ids[last + 1 :]
