"""Answers a large body in a preparation process, so that no running stream waits for it."""

from __future__ import annotations

import msgspec

from services.gateway.dialects.tokenization.bodies import DETOKENIZE_FIELDS, TOKENIZE_FIELDS
from services.gateway.dialects.tokenization.conversion import detokenize, encoded_body, tokenize
from services.gateway.text.chat_template import ChatTemplate
from services.gateway.text.model_files import ModelFiles
from services.gateway.text.process_jobs import BodyJob, PreparedBody

TOKENIZE, DETOKENIZE = "tokenize", "detokenize"


def answer(job: BodyJob, files: ModelFiles, template: ChatTemplate | None) -> PreparedBody:
    """Returns the body of the response. Raises InvalidRequest and its subclasses."""
    if job.kind == DETOKENIZE:
        tokens = DETOKENIZE_FIELDS.decode(job.body)
        response = detokenize(tokens, files.tokens, vocab_size=job.vocab_size or 0)
        return PreparedBody(msgspec.json.encode(response), [])
    body = TOKENIZE_FIELDS.decode(job.body)
    token_ids = encoded_body(body, job, files, template)
    most = job.max_context_tokens or 0
    tokenized = tokenize(body, token_ids, files.tokens, max_model_len=most)
    return PreparedBody(msgspec.json.encode(tokenized), [])
