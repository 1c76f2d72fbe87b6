"""Tokenizes the usual prompts of one model: python -m … [frames on stdin, stdout].

It has the model's tokenizer, which no other process of the gateway needs for them, and gets texts
that take a known time.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from services.gateway.preparation.template_process import BodyHandler, FileJob, loading, main
from services.gateway.text.chat_template import ChatTemplate
from services.gateway.text.model_files import prompt_tokenizer
from services.gateway.text.process_jobs import EncodeJob, JobRejected, ProcessSetup, Reply
from services.gateway.text.tokenizer import PromptTokenizer, encoded


def make_encoder(setup: ProcessSetup, _: ChatTemplate | None) -> BodyHandler:
    with loading():
        tokenizer = prompt_tokenizer(Path(setup.model_dir), setup.template_file)
    return partial(_answer, tokenizer)


def _answer(tokenizer: PromptTokenizer, job: FileJob) -> Reply:
    if isinstance(job, EncodeJob):
        return encoded(job, tokenizer)
    return JobRejected("this process prepares no bodies", None)


if __name__ == "__main__":
    main(make_encoder)
