"""A request's sampling parameters, token limits and prompts, without services."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tokenizers import Tokenizer
from tokenizers.processors import ByteLevel, TemplateProcessing

from services.gateway.models.served_text import ServedModel
from services.gateway.request.generation_request import GenerationRequest, max_output_tokens
from services.gateway.request.prompt import (
    ChatPrompt,
    Echo,
    PackedPrompt,
    Prompt,
    TextPrompt,
    TokenPrompt,
    encoded_echo,
    encoded_prompt,
)
from services.gateway.request.request_builder import PreparedRequest, RequestBuilder, check_logprobs
from services.gateway.request.sampling import SamplingFields
from services.gateway.text.model_files import ModelFiles
from services.gateway.text.tokenizer import bad_word_texts
from shared.config import GatewayConfig
from shared.errors import InvalidRequest, PromptTooLong
from shared.messages import SamplingParams
from shared.randomness import SystemRandomness
from shared.tenancy.tenant import TenantRecord
from tests.services.gateway.peer import CARD
from tests.support.services.model_dir import served_text, write_model_dir


def params(tmp_path: Path, defaults: dict[str, Any], **given: Any) -> SamplingParams:
    model_dir = write_model_dir(tmp_path / "m")
    (model_dir / "generation_config.json").write_text(json.dumps(defaults))
    return SamplingFields(**given).resolve(
        max_tokens=8,
        num_logprobs=None,
        num_prompt_logprobs=None,
        default_seed=11,
        card=CARD,
        files=ModelFiles(model_dir),
    )


@pytest.mark.parametrize(
    ("defaults", "given", "temperature"),
    [
        ({}, {}, 1.0),
        ({"temperature": 0.6}, {}, 0.6),
        ({"temperature": 0.6}, {"temperature": 0.0}, 0.0),
        ({"temperature": None}, {}, 1.0),
        ({"do_sample": True, "temperature": 0.6}, {}, 0.6),
        ({"do_sample": False, "temperature": 0.6}, {}, 0.0),
        ({"do_sample": False}, {"temperature": 0.3}, 0.3),
        ({"do_sample": False}, {"top_p": 0.9}, 1.0),
        ({"do_sample": False}, {"top_k": 0}, 1.0),
    ],
)
def test_temperature(
    tmp_path: Path, defaults: dict[str, Any], given: dict[str, Any], temperature: float
) -> None:
    assert params(tmp_path, defaults, **given).temperature == temperature


def test_request_overrides_model_defaults(tmp_path: Path) -> None:
    names = ("top_p", "top_k", "min_p", "repetition_penalty")
    defaults = {"top_p": 0.8, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.1}
    given = {"top_p": 0.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 0.5}
    for expected, fields in ((defaults, {}), (given, given)):
        resolved = params(tmp_path, defaults, **fields)
        assert {name: getattr(resolved, name) for name in names} == expected
    assert params(tmp_path, {}, top_k=-1).top_k == 0


@pytest.mark.parametrize("needs", [(), ("demo/1",)])
def test_request_needs_what_its_generation_needs(
    gateway_config: GatewayConfig, model_files: ModelFiles, needs: tuple[str, ...]
) -> None:
    generation = GenerationRequest(
        model="tiny", prompt=TokenPrompt([5], "prompt"), sampling=SamplingFields(), needs=needs
    )
    prepared = RequestBuilder(gateway_config, SystemRandomness()).build(
        generation,
        ServedModel(CARD, served_text(model_files)),
        tenant=TenantRecord(tenant_id="t"),
        request_id="r",
        max_payload_bytes=2**20,
    )
    assert prepared.request.needs == needs


@pytest.mark.parametrize(
    ("defaults", "given", "max_tokens"),
    [({}, None, 33), ({"max_new_tokens": 9}, None, 9), ({"max_new_tokens": 9}, 20, 20)],
)
def test_max_tokens(
    tmp_path: Path, defaults: dict[str, int], given: int | None, max_tokens: int
) -> None:
    model_dir = write_model_dir(tmp_path / "m")
    (model_dir / "generation_config.json").write_text(json.dumps(defaults))
    config = GatewayConfig(
        nats_url="nats://x",
        process_id="g",
        redis_url="redis://x",
        model_dir=model_dir,
        default_max_tokens=33,
    )
    prepared = RequestBuilder(config, SystemRandomness()).build(
        GenerationRequest(
            model="tiny",
            prompt=TokenPrompt([5], "prompt"),
            sampling=SamplingFields(),
            max_tokens=given,
        ),
        ServedModel(CARD, served_text(ModelFiles(model_dir))),
        tenant=TenantRecord(tenant_id="t"),
        request_id="r",
        max_payload_bytes=2**20,
    )
    assert prepared.request.sampling.max_tokens == max_tokens


def test_bad_word_is_banned_with_and_without_space(model_files: ModelFiles) -> None:
    decode = model_files.tokenizer.tokenizer.decode
    texts = [each for word in ("  fox", "<|im_end|>") for each in bad_word_texts(word)]
    banned = [model_files.tokenizer.encode([each]) for each in texts]
    spelled = [decode(each, skip_special_tokens=False) for each in banned]
    assert spelled == ["fox", " fox", "<|im_end|>", " <|im_end|>"]
    assert all(2 not in each for each in banned)  # as text: the special token can be sampled


# ── prompts ──────────────────────────────────────────────────────────────────────────────────────


def check_echo(echo: Echo | None, files: ModelFiles) -> None:
    assert echo is not None
    num_bytes = 0
    for token_id, offset in zip(echo.token_ids, echo.offsets, strict=True):
        assert len(echo.text[:offset].encode()) <= num_bytes  # smaller within a character
        num_bytes += len(files.tokens.token_bytes[token_id])
    assert num_bytes == len(echo.text.encode())


@pytest.mark.parametrize("text", ["the lazy 東京 fox", " a", "<|im_start|>x\n", "😀"])
def test_echo_of_text_and_of_its_tokens_agree(model_files: ModelFiles, text: str) -> None:
    echo = encoded_echo(TextPrompt(text, "prompt"), model_files)
    check_echo(echo, model_files)
    assert echo is not None
    assert echo == encoded_echo(TokenPrompt(echo.token_ids, "prompt"), model_files)


def test_offsets_do_not_depend_on_trimmed_spans(tmp_path: Path, model_files: ModelFiles) -> None:
    files = ModelFiles(write_model_dir(tmp_path / "m"))
    files.tokenizer.tokenizer.post_processor = ByteLevel(trim_offsets=True)
    prompt = TextPrompt("the lazy 東 dog", "prompt")
    assert files.tokenizer.tokenizer.encode(prompt.text).offsets[2][0] > 3
    assert encoded_echo(prompt, files) == encoded_echo(prompt, model_files)


def test_tokenizer_may_add_first_and_last_tokens(tmp_path: Path) -> None:
    path = write_model_dir(tmp_path / "m") / "tokenizer.json"
    own = Tokenizer.from_file(str(path))
    own.post_processor = TemplateProcessing(
        single="<|endoftext|> $A <|endoftext|> <|endoftext|>", special_tokens=[("<|endoftext|>", 0)]
    )
    own.save(str(path))
    files = ModelFiles(path.parent)
    assert encoded_prompt(TextPrompt("", "prompt"), files) == [0, 0, 0]
    echo = encoded_echo(TextPrompt("hello", "prompt"), files)
    assert echo is not None
    assert (echo.text, echo.token_ids[0], echo.offsets[:2]) == ("hello", 0, [0, 0])
    assert echo.offsets == sorted(echo.offsets) and echo.offsets[-2:] == [5, 5]
    without_special = TextPrompt("hello", "prompt", add_special_tokens=False)
    assert encoded_prompt(without_special, files) == echo.token_ids[1:-2]
    with pytest.raises(InvalidRequest, match="must hold a token"):
        encoded_prompt(TextPrompt("", "prompt", add_special_tokens=False), files)


@pytest.mark.parametrize(
    ("options", "longest"),
    [
        ({}, 511),
        ({"has_echo": True}, 511),
        ({"has_echo": True, "shows_output": False}, 512),  # only prompt logprobs are returned
        ({"pooling": "last", "shows_output": False}, 512),
    ],
)
def test_prompt_may_fill_context_if_no_output_is_shown(
    options: dict[str, Any], longest: int
) -> None:
    generation = GenerationRequest(
        model="tiny",
        prompt=TextPrompt("a", "prompt"),
        sampling=SamplingFields(),
        max_tokens=1,
        **options,
    )
    card = msgspec.structs.replace(CARD, max_context_tokens=512)
    assert max_output_tokens(generation, longest, card, default=9) == 1
    with pytest.raises(PromptTooLong, match="maximum context length is 512 tokens"):
        max_output_tokens(generation, longest + 1, card, default=9)


# ── logprobs ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("num_prompts", [1, 8])
@pytest.mark.parametrize("param", ["logprobs", "top_logprobs"])
def test_logprobs_beyond_64_mib_are_rejected(
    gateway_config: GatewayConfig, model_files: ModelFiles, num_prompts: int, param: str
) -> None:
    """Choices, tokens and top logprobs multiply, and all prompts of a response count together."""

    def prepare(max_tokens: int) -> PreparedRequest:
        generation = GenerationRequest(
            model="tiny",
            prompt=TokenPrompt([5], "prompt"),
            sampling=SamplingFields(),
            max_tokens=max_tokens,
            num_logprobs=20,
            num_choices=128,
            logprobs_param=param,
        )
        return RequestBuilder(gateway_config, SystemRandomness()).build(
            generation,
            ServedModel(
                msgspec.structs.replace(CARD, max_context_tokens=8192), served_text(model_files)
            ),
            tenant=TenantRecord(tenant_id="t"),
            request_id="r",
            max_payload_bytes=2**23,
        )

    most = 64 * 1024 * 1024 // (128 * (8 + 8 * 21))
    check_logprobs([prepare(most // num_prompts)] * num_prompts)
    with pytest.raises(InvalidRequest, match=f"{param}: the logprobs of this request") as raised:
        check_logprobs([prepare(most // num_prompts + 1)] * num_prompts)
    assert raised.value.param == param


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        (ChatPrompt((), (), param="input"), "input: the model's chat template writes nothing"),
        (PackedPrompt(b"", "messages", is_chat=True), "messages: the model's chat template writes"),
        (PackedPrompt(b"", "prompt"), "prompt: a prompt must hold a token"),
        (TextPrompt("", "prompt"), "prompt: a prompt must hold a token"),
        (TokenPrompt([], "prompt[1]"), r"prompt\[1\]: a prompt must hold a token"),
    ],
)
def test_prompts_without_tokens_are_refused(tmp_path: Path, prompt: Prompt, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^{reason}") as refusal:
        encoded_prompt(prompt, ModelFiles(write_model_dir(tmp_path / "m")))
    assert refusal.value.param == prompt.param
