"""Converts text to tokens and back, for decoded requests and without I/O."""

from __future__ import annotations

from services.gateway.dialects.tokenization.bodies import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
    check_tokenize,
    prompt_of,
)
from services.gateway.request.images.image_prompts import check_text_bytes
from services.gateway.request.prepared_bodies import tokens_of_chat
from services.gateway.text.chat_template import ChatTemplate
from services.gateway.text.decoding.token_table import TokenTable
from services.gateway.text.model_files import ModelFiles
from services.gateway.text.process_jobs import BodyJob
from shared.errors import InvalidRequest


def tokenize(
    body: TokenizeRequest, token_ids: list[int], tokens: TokenTable, *, max_model_len: int
) -> TokenizeResponse:
    """Returns the response. `token_ids`: the tokens of the checked body's prompt, or of its
    rendered messages.
    """
    return TokenizeResponse(
        count=len(token_ids),
        max_model_len=max_model_len,
        tokens=token_ids,
        token_strs=tokens.spelled(token_ids) if body.return_token_strs else None,
    )


def detokenize(
    body: DetokenizeRequest, tokens: TokenTable, *, vocab_size: int
) -> DetokenizeResponse:
    """Returns the text, with the texts of special tokens. `vocab_size`: the model's, which may be
    padded beyond the tokenizer's. Raises InvalidRequest for a token outside both vocabularies.
    """
    limit = max(vocab_size, tokens.vocab_size)
    highest = max(body.tokens, default=0)
    if highest >= limit:
        raise InvalidRequest(
            f"tokens: {highest} is not in this model's vocabulary of {limit}", param="tokens"
        )
    return DetokenizeResponse(prompt=tokens.decode(body.tokens))


def encoded_body(
    body: TokenizeRequest, job: BodyJob, files: ModelFiles, template: ChatTemplate | None
) -> list[int]:
    """Tokenizes the prompt or the rendered messages in a preparation process. Raises InvalidRequest
    and PayloadTooLarge.
    """
    check_tokenize(body)
    if body.messages is None:
        add = body.add_special_tokens is not False
        check_text_bytes(job.body, (), job.images)
        return files.tokenizer.encode_text(body.prompt or "", add_special_tokens=add)
    adds = body.add_generation_prompt is not False
    return tokens_of_chat(prompt_of(body), job, files, template, add_generation_prompt=adds)
