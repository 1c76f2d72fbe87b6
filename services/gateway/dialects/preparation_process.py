"""A preparation process: python -m … [frames on stdin, stdout].

It renders templates, as `preparation/template_process.py`, and prepares large request bodies,
these at a low CPU priority: on a busy core, the gateway, its peers and the renderings of small
requests, which take some 0.1 ms, need not wait for the 0.1 to 6 s of a body of another tenant.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from services.gateway.preparation.template_process import BodyHandler, FileJob, loading, main
from services.gateway.text.chat_template import ChatTemplate
from services.gateway.text.process_jobs import (
    Encoded,
    EncodeJob,
    ImageChatJob,
    PreparedBody,
    ProcessSetup,
)

if TYPE_CHECKING:
    from services.gateway.dialects.dialect import Dialect

BODY_NICENESS = 10  # more than the process has


def make_body_handler(setup: ProcessSetup, template: ChatTemplate | None) -> BodyHandler:
    """Loads the dialects, which a process that only renders does not need."""
    from services.gateway.dialects.dialect_table import DIALECTS

    return body_handler(setup, template, DIALECTS)


def body_handler(
    setup: ProcessSetup, template: ChatTemplate | None, dialects: Sequence[Dialect]
) -> BodyHandler:
    """Loads the tokenizer. Returns a function that prepares the bodies of the dialects."""
    from services.gateway.request.endpoint import GeneratingEndpoint
    from services.gateway.request.prepared_bodies import prepare_body, prepare_image_chat
    from services.gateway.text.model_files import ModelFiles
    from services.gateway.text.tokenizer import encoded

    jobs = {kind: job for each in dialects for kind, job in each.jobs.items()}
    endpoints = {each.name: each for dialect in dialects for each in dialect.endpoints}
    with loading():
        files = ModelFiles(Path(setup.model_dir), setup.template_file)

    def prepare(job: FileJob) -> PreparedBody | Encoded:
        if isinstance(job, EncodeJob):
            return encoded(job, files.tokenizer)
        if isinstance(job, ImageChatJob):
            return prepare_image_chat(job, files, template)
        if job.kind in jobs:
            return jobs[job.kind](job, files, template)
        endpoint = endpoints[job.kind]
        assert isinstance(endpoint, GeneratingEndpoint), "the bodies of others are jobs"
        if job.stored:
            assert endpoint.merge is not None, "only such an endpoint has stored state"
            body = endpoint.merge(job.body, job.stored)
            job = msgspec.structs.replace(job, body=body, stored=b"")
        return prepare_body(job, endpoint, files, template)

    return lambda job: _body_thread().submit(prepare, job).result()


@cache
def _body_thread() -> ThreadPoolExecutor:
    """Returns the thread that prepares the bodies of all models: on Linux each thread has its own
    niceness, which a process without privileges can only raise.
    """
    return ThreadPoolExecutor(max_workers=1, initializer=_lower_priority)


def _lower_priority() -> None:
    thread = threading.get_native_id()
    niceness = os.getpriority(os.PRIO_PROCESS, thread) + BODY_NICENESS
    os.setpriority(os.PRIO_PROCESS, thread, niceness)


if __name__ == "__main__":
    main(make_body_handler)
