"""A preparation process: python -m … [frames on stdin, stdout].

It renders templates, as `text/template_process.py`, and prepares large request bodies.
"""

from __future__ import annotations

import resource
from pathlib import Path

from services.gateway.text.chat_template import ChatTemplate
from services.gateway.text.process_jobs import BodyJob, PreparedBody, ProcessSetup
from services.gateway.text.template_process import MAX_MEMORY_BYTES, BodyHandler, main


def make_body_handler(setup: ProcessSetup, template: ChatTemplate | None) -> BodyHandler:
    """Loads the tokenizer, and the dialects, which a process that only renders does not need."""
    from services.gateway.openai.prepared_bodies import prepare_body
    from services.gateway.prefixes.large_bodies import PREFIX_KINDS, check_prefix_body
    from services.gateway.text.model_files import ModelFiles

    _, most = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    files = ModelFiles(Path(setup.model_dir))
    resource.setrlimit(resource.RLIMIT_AS, (_num_mapped_bytes() + MAX_MEMORY_BYTES, most))

    def handle(job: BodyJob) -> PreparedBody:
        if job.kind in PREFIX_KINDS:
            return check_prefix_body(job, files.tokenizer.longest_token_chars)
        return prepare_body(job, files, template)

    return handle


def _num_mapped_bytes() -> int:
    num_pages = int(Path("/proc/self/statm").read_text().split()[0])
    return num_pages * resource.getpagesize()


if __name__ == "__main__":
    main(make_body_handler)
