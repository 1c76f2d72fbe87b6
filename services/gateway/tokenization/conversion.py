"""Text to tokens and back: pure, for requests that are decoded."""

from __future__ import annotations

from services.gateway.text.chat_template import ChatTemplate, LiteralText
from services.gateway.text.process_jobs import Encoded, EncodeJob
from services.gateway.text.tokenizer import PromptTokenizer
from services.gateway.tokenization.bodies import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
    check_tokenize,
    prompt_of,
)
from shared.errors import InvalidRequest


def tokenize(
    body: TokenizeRequest,
    tokenizer: PromptTokenizer,
    *,
    max_model_len: int,
    chat_token_ids: list[int] | None = None,
) -> TokenizeResponse:
    """`chat_token_ids`: of the rendered messages, for a body with messages. Raises InvalidRequest
    if fields contradict each other.
    """
    check_tokenize(body)
    if body.messages is None:
        add = body.add_special_tokens is not False
        token_ids = tokenizer.encode_text(body.prompt or "", add_special_tokens=add)
    else:
        assert chat_token_ids is not None, "the messages are rendered before"
        token_ids = chat_token_ids
    return TokenizeResponse(
        count=len(token_ids),
        max_model_len=max_model_len,
        tokens=token_ids,
        token_strs=tokenizer.spelled(token_ids) if body.return_token_strs else None,
    )


def detokenize(
    body: DetokenizeRequest, tokenizer: PromptTokenizer, *, vocab_size: int
) -> DetokenizeResponse:
    """Special tokens become their texts. `vocab_size`: of the model, which may pad that of its
    tokenizer. Raises InvalidRequest for a token outside both vocabularies.
    """
    limit = max(vocab_size, tokenizer.vocab_size)
    highest = max(body.tokens, default=0)
    if highest >= limit:
        raise InvalidRequest(
            f"tokens: {highest} is not in this model's vocabulary of {limit}", param="tokens"
        )
    return DetokenizeResponse(prompt=tokenizer.decode(body.tokens))


def encoded(job: EncodeJob, tokenizer: PromptTokenizer) -> Encoded:
    """In a preparation process."""
    texts = [LiteralText(text) if is_literal else text for is_literal, text in job.parts]
    add = job.adds_special_tokens
    if add is None:
        return Encoded([tokenizer.encode([text]) for text in texts], [])
    pairs = [tokenizer.encode_with_offsets(text, add_special_tokens=add) for text in texts]
    return Encoded([ids for ids, _ in pairs], [offsets for _, offsets in pairs])


def chat_tokens(
    body: TokenizeRequest, template: ChatTemplate | None, tokenizer: PromptTokenizer
) -> list[int] | None:
    """The tokens of the rendered messages; None for a body with a prompt. Takes the template's
    time. Raises InvalidRequest, PayloadTooLarge.
    """
    if body.messages is None:
        return None
    check_tokenize(body)
    if template is None:
        raise InvalidRequest("this model has no chat template", param="messages")
    prompt = prompt_of(body)
    parts = template.render(
        prompt.messages,
        prompt.tools,
        add_generation_prompt=body.add_generation_prompt is not False,
        variables=prompt.variables,
    )
    return tokenizer.encode(parts)
