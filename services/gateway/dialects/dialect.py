"""Declares a dialect of the API: a folder has one, and `dialects/dialect_table.py` lists them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from services.gateway.models.model_names import ModelNames
from services.gateway.request.endpoint import Endpoint
from services.gateway.request.preparer import Preparer
from services.gateway.text.chat_template import ChatTemplate
from services.gateway.text.model_files import ModelFiles
from services.gateway.text.process_jobs import BodyJob, PreparedBody
from shared.errors import HearthError
from shared.tenancy.tenant import TenantRecord

# error, id of the request → the HTTP status and the body
EncodeError = Callable[[HearthError, str], tuple[int, Any]]
# in a preparation process; raises InvalidRequest and its subclasses
Job = Callable[[BodyJob, ModelFiles, ChatTemplate | None], PreparedBody]
# tenant, body → body of the response; raises the HearthError that rejects the request
Answer = Callable[[TenantRecord, bytes], Awaitable[bytes]]
Answers = Mapping[str, Answer]  # by the names of their endpoints
REQUEST_ID = "x-request-id"


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """Declares what is particular to the clients of one API.

    `name`: in metrics. `owns`: whether the errors of a path have this form and count under this
    name; paths that no dialect owns are OpenAI's. `error`: the type of what `encode_error` returns.
    `request_id_headers`: of each response. `jobs`: large bodies that preparation processes take
    besides those of endpoints that generate, by their kind. `answers`: of the endpoints that do not
    generate.
    """

    name: str
    endpoints: tuple[Endpoint, ...]
    encode_error: EncodeError
    error: type[Any]
    owns: Callable[[str], bool] = lambda _: False
    request_id_headers: tuple[str, ...] = (REQUEST_ID,)
    jobs: Mapping[str, Job] = field(default_factory=dict)
    answers: Callable[[Preparer, ModelNames], Answers] = lambda *_: {}
