"""Checks large bodies of `/v1/prefixes` in a preparation process. A body that passes has few values
and prompts that may fit, so the gateway decodes it quickly.
"""

from __future__ import annotations

from services.gateway.dialects.prefixes.bodies import (
    DryRunBody,
    DryRunRequest,
    PrefixBody,
    prompt_of,
)
from services.gateway.dialects.prefixes.dry_run import to_generation_request
from services.gateway.request.generation_request import check_min_tokens
from services.gateway.request.prompt import Prompt
from services.gateway.text.chat_template import ChatTemplate
from services.gateway.text.model_files import ModelFiles
from services.gateway.text.process_jobs import BodyJob, PreparedBody

PREFIX, DRY_RUN = "prefix", "dry_run"


def check_prefix_body(job: BodyJob, files: ModelFiles, _: ChatTemplate | None) -> PreparedBody:
    """Returns the body unchanged. Raises InvalidRequest and its subclasses."""
    for prompt in _prompts(job):
        check_min_tokens(
            prompt,
            files.longest_token_chars,
            max_context_tokens=job.max_context_tokens,
            max_input_tokens=job.max_input_tokens,
        )
    return PreparedBody(job.body, [])


def _prompts(job: BodyJob) -> list[Prompt]:
    if job.kind == PREFIX:
        return [prompt_of(PrefixBody.fields.decode(job.body))]
    body: DryRunRequest = DryRunBody.fields.decode(job.body)
    return [to_generation_request(given, param, "").prompt for param, given in body.named]
