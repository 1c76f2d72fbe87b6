"""The table decodes as the library's tokenizer, with every kind of decoder and of added token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

from services.gateway.text.decoding.detokenizer import Detokenizer
from services.gateway.text.decoding.packed_texts import PackedTexts, packed
from services.gateway.text.decoding.token_table import TokenTable
from services.gateway.text.tokenizer import PromptTokenizer
from shared.errors import ConfigError, HearthError

PIECES = ("▁a", "▁", "b", "##c", "d</w>", "Ġe", "ðŁ", "ĺĢ", "<0xF0>", "<0x9F>", "<0x98>", "<0x80>")
LLAMA = [
    decoders.Replace("▁", " "),
    decoders.ByteFallback(),
    decoders.Fuse(),
    decoders.Strip(" ", 1, 0),
]
DECODERS: dict[str, Any] = {
    "none": None,
    "ByteLevel": decoders.ByteLevel(),
    "Metaspace": decoders.Metaspace(),
    "Llama": decoders.Sequence(LLAMA),  # type: ignore[arg-type]
    "WordPiece": decoders.WordPiece(),
    "BPEDecoder": decoders.BPEDecoder(),
    "Replace": decoders.Replace("b", "bb"),
    "Fuse": decoders.Fuse(),
}


def tokenizer_of(decoder: Any) -> Tokenizer:
    """Ids with gaps, special tokens, and one whose text is written otherwise than it is read."""
    vocab = {each: 2 * number for number, each in enumerate(PIECES)} | {"<s>": 1, "<unk>": 3}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Lowercase(), normalizers.Replace(" ", "▁")]
    )
    tokenizer.add_special_tokens(["<s>", "<e>"])
    tokenizer.add_tokens([AddedToken("A B", normalized=True), AddedToken("<T>", normalized=False)])
    tokenizer.add_special_tokens([AddedToken("B", normalized=True)])  # read as the token "b"
    if decoder is not None:
        tokenizer.decoder = decoder
    return tokenizer


@pytest.fixture(scope="module", params=DECODERS)
def pair(request: pytest.FixtureRequest) -> tuple[Tokenizer, TokenTable]:
    tokenizer = tokenizer_of(DECODERS[request.param])
    sent = msgspec.msgpack.encode(PromptTokenizer(tokenizer.to_str()).table())
    return tokenizer, msgspec.msgpack.decode(sent, type=TokenTable)


@given(
    token_ids=st.lists(st.integers(0, 32), max_size=40),
    sizes=st.lists(st.integers(1, 9), max_size=20),
)
def test_any_tokens_have_the_library_s_text(
    pair: tuple[Tokenizer, TokenTable], token_ids: list[int], sizes: list[int]
) -> None:
    tokenizer, tokens = pair
    for skips in (False, True):
        expected = tokenizer.decode(token_ids, skip_special_tokens=skips)
        assert tokens.decode(token_ids, skips_special=skips) == expected
        detokenizer, left, text = Detokenizer(tokens, skips_special_tokens=skips), token_ids, ""
        for size in (*sizes, len(token_ids)):
            text += "".join(detokenizer.feed(left[:size]))
            left = left[size:]
        text += detokenizer.flush()
        if tokenizer.decoder is not None:  # words alone have no spaces between them
            assert text == expected


@pytest.mark.parametrize("is_joined", [False, True])
def test_panic_of_a_decoder_is_an_error_of_its_caller(is_joined: bool) -> None:
    """The library's `Strip` fails on a text that has no more than it strips."""
    strip = decoders.Strip(" ", 1, 1)
    decoder = decoders.Sequence([decoders.Fuse(), strip]) if is_joined else strip
    tokenizer = tokenizer_of(decoder)
    tokenizer.add_tokens([AddedToken(each, normalized=False) for each in (" ", "  a ")])
    tokens = PromptTokenizer(tokenizer.to_str()).table()
    first, second = (tokens.added_ids[each] for each in (" ", "  a "))
    assert tokens.decode([second]) == " a"
    with pytest.raises(HearthError, match="decoder fails on 1 tokens: "):
        tokens.decode([first])


def test_each_token_is_decoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the one before it: what this one decodes to alone is known since its last use."""
    tokens = PromptTokenizer(tokenizer_of(DECODERS["Llama"]).to_str()).table()
    decode, decoded = TokenTable.decode, []

    def recorded(self: TokenTable, token_ids: Sequence[int], **options: bool) -> str:
        decoded.append(token_ids)
        return decode(self, token_ids, **options)

    monkeypatch.setattr(TokenTable, "decode", recorded)
    Detokenizer(tokens).feed([0, 4, 0, 4] * 25)
    assert len(decoded) <= 100 + 2


def test_texts_by_number() -> None:
    texts = packed(["a", None, "", "é東"])
    assert [texts[number] for number in range(-1, 5)] == [None, "a", None, "", "é東", None]
    assert len(texts) == 4 and PackedTexts()[0] is None
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(texts), type=PackedTexts) == texts


def test_ids_that_no_model_has_are_refused() -> None:
    small = Tokenizer(models.BPE({"a": 7}, [])).to_str()  # of 2**31, it takes 8 GiB
    tokenizer = PromptTokenizer(small.replace('{"a":7}', f'{{"a":{2**31}}}'))
    with pytest.raises(ConfigError, match="token 2147483648, the limit is 4194303"):
        tokenizer.table()
