"""Text to tokens and back, without a gateway."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from services.cli.cluster.service_options import DEMO_MODEL_DIR
from services.gateway.dialects.tokenization import conversion
from services.gateway.dialects.tokenization.bodies import (
    DETOKENIZE_FIELDS,
    TOKENIZE_FIELDS,
    DetokenizeRequest,
    TokenizeRequest,
)
from services.gateway.dialects.tokenization.conversion import detokenize, tokenize
from services.gateway.structured.tools.tool_fields import ToolField
from services.gateway.text.chat_template import ChatTemplate
from services.gateway.text.decoding.token_table import TokenTable
from services.gateway.text.model_files import ModelFiles
from services.gateway.text.process_jobs import BodyJob
from services.gateway.text.tokenizer import PromptTokenizer
from shared.errors import InvalidRequest, PayloadTooLarge
from tests.support.grids import in_one_test

SPECIAL = ["<|user|>", "<|end|>", "<|endoftext|>", "<|im_start|>", "<|us", "er|>"]
PIECES = ["", " ", "  ", "\n", "\r\n", "\t", "a", "the", "é", "e\u0301", "東", "😀", "\u0000"]


def encoded_body(
    body: TokenizeRequest, template: ChatTemplate | None, tokenizer: PromptTokenizer
) -> list[int]:
    files: Any = SimpleNamespace(tokenizer=tokenizer, images=None)
    return conversion.encoded_body(body, BodyJob("tokenize", b""), files, template)


@pytest.fixture(scope="module", params=["trained here", "demo"])
def tokenizer(request: pytest.FixtureRequest, model_files: ModelFiles) -> PromptTokenizer:
    return (
        model_files if request.param == "trained here" else ModelFiles(DEMO_MODEL_DIR)
    ).tokenizer


@cache
def table(tokenizer: PromptTokenizer) -> TokenTable:
    return tokenizer.table()


def texts() -> st.SearchStrategy[str]:
    pieces = st.sampled_from(PIECES + SPECIAL) | st.text(max_size=8)
    return st.lists(pieces, max_size=12).map("".join)


@settings(max_examples=40)
@given(text=texts())
def test_detokenized_tokens_are_the_same_text(tokenizer: PromptTokenizer, text: str) -> None:
    body = TokenizeRequest(prompt=text, add_special_tokens=False)
    tokens = encoded_body(body, None, tokenizer)
    back = detokenize(DetokenizeRequest(tokens=tokens), table(tokenizer), vocab_size=0)
    assert back.prompt == text


def test_tokens_of_a_sentencepiece_decoder_lose_the_first_space(tmp_path: Path) -> None:
    """The text of `detokenize` is the decoder's."""
    vocab = {"▁": 0, "a": 1, "▁a": 2}
    own = Tokenizer(models.BPE(vocab=vocab, merges=[("▁", "a")]))
    own.pre_tokenizer = pre_tokenizers.Metaspace()
    own.decoder = decoders.Metaspace()
    own.save(str(tmp_path / "tokenizer.json"))
    tokenizer = PromptTokenizer((tmp_path / "tokenizer.json").read_text())
    for text in ("a a", " a a"):
        body = TokenizeRequest(prompt=text, add_special_tokens=False)
        given = DetokenizeRequest(tokens=encoded_body(body, None, tokenizer))
        assert detokenize(given, table(tokenizer), vocab_size=0).prompt == "a a"


TEMPLATES = ["[S] $A", "[S] $A [E]", "$A [E]", "[S] [S] $A [E] [E]", "$A"]


@pytest.mark.parametrize("template", TEMPLATES)
def test_special_tokens_are_added_as_the_tokenizer_adds_them(
    model_dir: Path, tmp_path: Path, template: str
) -> None:
    own = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    own.add_special_tokens(["[S]", "[E]"])
    ids = [(name, own.token_to_id(name)) for name in ("[S]", "[E]")]
    own.post_processor = TemplateProcessing(single=template, special_tokens=ids)
    own.save(str(tmp_path / "tokenizer.json"))
    tokenizer = PromptTokenizer((tmp_path / "tokenizer.json").read_text())
    for text in ("", "the fox", "[S] a [E]", "😀"):
        for add in (True, False):
            expected = own.encode(text, add_special_tokens=add).ids
            body = TokenizeRequest(prompt=text, add_special_tokens=add)
            assert encoded_body(body, None, tokenizer) == expected
        default = encoded_body(TokenizeRequest(prompt=text), None, tokenizer)
        assert default == own.encode(text, add_special_tokens=True).ids


def test_token_strs_are_the_vocabulary_s(tokenizer: PromptTokenizer) -> None:
    body = TokenizeRequest(prompt="hello é<|im_end|>", return_token_strs=True)
    token_ids = encoded_body(body, None, tokenizer)
    response = tokenize(body, token_ids, table(tokenizer), max_model_len=7)
    vocab = tokenizer.tokenizer.get_vocab()
    assert response.token_strs is not None and response.max_model_len == 7
    assert [vocab[each] for each in response.token_strs] == response.tokens


def test_tokens_of_messages_follow_the_template(model_files: ModelFiles) -> None:
    body = TokenizeRequest(messages=TOKENIZE_FIELDS.decode(encoded(messages=MESSAGES)).messages)
    assert model_files.chat_template is not None
    tokenizer, template = model_files.tokenizer, model_files.chat_template.compiled()
    shown, opened = "<|im_start|>user\nhi<|im_end|>\n", "<|im_start|>assistant\n"
    assert encoded_body(body, template, tokenizer) == tokenizer.encode([shown + opened])
    closed = msgspec.structs.replace(body, add_generation_prompt=False)
    assert encoded_body(closed, template, tokenizer) == tokenizer.encode([shown])
    assert encoded_body(TokenizeRequest(prompt="a"), None, tokenizer) == tokenizer.encode(["a"])
    with pytest.raises(InvalidRequest, match=r"no chat template: use .*--chat-template"):
        encoded_body(body, None, tokenizer)
    with pytest.raises(InvalidRequest, match="does not support tools"):
        encoded_body(
            msgspec.structs.replace(body, tools=[ToolField(name="f")]), template, tokenizer
        )


# ── invalid bodies ───────────────────────────────────────────────────────────────────────────────

MESSAGES = [{"role": "user", "content": "hi"}]
DEEP: list[Any] = []
for _ in range(40):
    DEEP = [DEEP]


def encoded(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


def run_tokenize(data: bytes, files: ModelFiles) -> Any:
    body = TOKENIZE_FIELDS.decode(data)
    source = files.chat_template
    template = None if source is None else source.compiled()
    token_ids = encoded_body(body, template, files.tokenizer)
    return tokenize(body, token_ids, files.tokens, max_model_len=1)


def run_detokenize(data: bytes, files: ModelFiles) -> Any:
    return detokenize(DETOKENIZE_FIELDS.decode(data), files.tokens, vocab_size=400)


@in_one_test(
    ("run", "data", "param"),
    [
        (run_tokenize, b"{}", "prompt"),
        (run_tokenize, encoded(prompt=None), "prompt"),
        (run_tokenize, encoded(prompt="a", messages=MESSAGES), "messages"),
        (run_tokenize, encoded(prompt=["a"]), "prompt"),
        (run_tokenize, encoded(prompt=[1]), "prompt"),
        (run_tokenize, encoded(messages=[]), "messages"),
        (run_tokenize, encoded(messages=[{"role": "user"}]), "messages[0].content"),
        (run_tokenize, encoded(messages=MESSAGES, add_special_tokens=True), "add_special_tokens"),
        (run_tokenize, encoded(prompt="a", tools=[{"name": "f"}]), "tools"),
        (run_tokenize, encoded(prompt="a", chat_template_kwargs={"a": 1}), "chat_template_kwargs"),
        (run_tokenize, encoded(messages=MESSAGES, chat_template_kwargs={"tools": 1}),
         "chat_template_kwargs.tools"),
        (run_tokenize, encoded(messages=MESSAGES, chat_template="x"), "chat_template"),
        (run_tokenize, encoded(messages=MESSAGES, continue_final_message=True),
         "continue_final_message"),
        (run_tokenize, encoded(prompt="a", return_token_strs=1), "return_token_strs"),
        (run_tokenize, b'{"prompt": "a\\ud800b"}', "prompt"),
        (run_tokenize, b'{"x": 1, "prompt": "a\\udc00"}', "prompt"),
        (run_tokenize, b'{"prompt": "\xff"}', "prompt"),
        (run_tokenize, b'{"messages": [{"role": "user", "content": "\\ud800"}]}', "messages"),
        (run_tokenize, b'{"prompt": "a", "model": "\\ud800"}', "model"),
        (run_tokenize, b'{"prompt": "a", "\\ud800": "\\ud800"}', None),
        (run_tokenize, b'{"prompt": "a\\q\\ud800"}', None),
        (run_tokenize, b'[' * 5000, None),
        (run_tokenize, b'["\\ud800"]', None),
        (run_tokenize, b"", None),
        (run_detokenize, b"{}", "tokens"),
        (run_detokenize, encoded(tokens="a"), "tokens"),
        (run_detokenize, encoded(tokens=[0, -1]), "tokens[1]"),
        (run_detokenize, encoded(tokens=[1.5]), "tokens[0]"),
        (run_detokenize, encoded(tokens=[True]), "tokens[0]"),
        (run_detokenize, encoded(tokens=[400]), "tokens"),
        (run_detokenize, encoded(tokens=[2**32]), "tokens[0]"),
        (run_detokenize, encoded(tokens=[2**63]), "tokens[0]"),
        (run_detokenize, encoded(tokens=[10**30]), "tokens[0]"),
        (run_detokenize, b'{"tokens": [1e400]}', "tokens[0]"),
        (run_detokenize, b'{"tokens": [1], "model": "\\ud800"}', "model"),
    ],
)  # fmt: skip
def test_invalid_body_is_rejected_with_its_field(
    run: Callable[[bytes, ModelFiles], Any],
    data: bytes,
    param: str | None,
    model_files: ModelFiles,
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        run(data, model_files)
    assert caught.value.param == param and caught.value.http_status == 400
    field = "" if param is None else param.split(".")[-1].partition("[")[0]
    assert field in caught.value.message
    caught.value.message.encode()


@pytest.mark.parametrize("parameters", [{"a": DEEP}, {"a": [0] * 20_000}])
def test_tools_are_bounded(parameters: dict[str, Any], model_files: ModelFiles) -> None:
    tools = [{"name": "f", "parameters": parameters}]
    with pytest.raises(PayloadTooLarge) as caught:
        run_tokenize(encoded(messages=MESSAGES, tools=tools), model_files)
    assert caught.value.param == "tools"


def test_token_without_text_detokenizes_to_nothing(model_files: ModelFiles) -> None:
    """A model's vocabulary may be larger than its tokenizer's."""
    body = DetokenizeRequest(tokens=[])
    assert detokenize(body, model_files.tokens, vocab_size=0).prompt == ""
    padding = DetokenizeRequest(tokens=[model_files.tokens.vocab_size])
    assert detokenize(padding, model_files.tokens, vocab_size=512).prompt == ""
