"""A gateway with one dialect more: its declaration is all that HTTP, NATS, the OpenAPI document and
the preparation of large bodies need.
"""

from __future__ import annotations

import json
import resource
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
from litestar import Request, get

from services.gateway.dialects.dialect import Dialect, DialectParts, Handlers, OpenDialect
from services.gateway.dialects.dialect_table import DIALECTS
from services.gateway.dialects.http_parts import HttpParts
from services.gateway.dialects.preparation_process import body_handler
from services.gateway.dialects.route_options import IS_FREE
from services.gateway.output.events import Event, TextDelta
from services.gateway.output.framing import Framing
from services.gateway.output.results import Results
from services.gateway.request.endpoint import (
    Endpoint,
    EndpointState,
    GeneratingEndpoint,
    ResponseContext,
)
from services.gateway.request.generation_request import GenerationRequest
from services.gateway.request.prompt import TextPrompt
from services.gateway.request.sampling import SamplingFields
from services.gateway.request.supported_fields import SupportedFields
from services.gateway.text.model_files import ModelFiles
from services.gateway.text.process_jobs import BodyJob, ProcessSetup
from shared.config import GatewayConfig
from shared.errors import HearthError
from shared.packing import TOKEN_ID_BYTES
from shared.tenancy.tenant import TenantRecord
from tests.services.gateway.conftest import ANSWER, running_cluster
from tests.services.gateway.nats_api.conftest import Api, all_of, connected, has_joined
from tests.support.servers import NatsServer
from tests.support.waiting import until


class PoemRequest(SamplingFields, frozen=True, kw_only=True):
    about: str
    line_by_line: bool = False


class Poem(msgspec.Struct, frozen=True):
    poem: str
    for_tenant: str


class PoemLine(msgspec.Struct, frozen=True):
    line: str


class Apology(msgspec.Struct, frozen=True):
    sorry: str
    about_field: str | None
    request: str


class Letters(msgspec.Struct, frozen=True):
    num_letters: int


def apologize(error: HearthError, request_id: str) -> tuple[int, Apology]:
    return error.http_status + 10, Apology(error.code, error.param, request_id)


@dataclass
class PoemEncoder:
    framing: Framing
    tenant_id: str

    @classmethod
    def of(cls, _: PoemRequest, context: ResponseContext) -> PoemEncoder:
        return cls(context.framing, context.state)

    def keep_alive(self) -> bytes:
        return b""

    def events(self, events: Sequence[Event]) -> Iterator[bytes]:
        texts = (each.text for each in events if isinstance(each, TextDelta))
        return (self.framing.event(PoemLine(text)) for text in texts)

    def closing(self) -> bytes:
        return b""

    def body(self, results: Results) -> Iterator[bytes]:
        yield msgspec.json.encode(Poem(results.choices[0].text, self.tenant_id))

    def error_status(self, error: HearthError) -> int:
        return apologize(error, "")[0]

    def error_body(self, error: HearthError) -> Apology:
        return apologize(error, "")[1]

    def error_event(self, error: HearthError) -> bytes:
        return self.framing.event(self.error_body(error))


def generations(body: PoemRequest, model: str) -> list[GenerationRequest]:
    return [GenerationRequest(model=model, prompt=TextPrompt(body.about, "about"), sampling=body)]


def opened(parts: DialectParts) -> OpenDialect:
    async def count(tenant: TenantRecord, data: bytes) -> bytes:
        return msgspec.json.encode(Letters(len(data)))

    def handlers(http: HttpParts) -> Handlers:
        @get("/poems/known", opt={IS_FREE: True}, **http.options)
        async def known(request: Request[Any, Any, Any]) -> dict[str, str]:
            return {"known_to": request.state.tenant.tenant_id}

        return [known]

    return OpenDialect(
        answers={"letters": count},
        states={"poem": EndpointState(lambda tenant: tenant.tenant_id)},
        handlers=handlers,
    )


POEMS = Dialect(
    name="poems",
    endpoints=(
        GeneratingEndpoint(
            name="poem",
            operation="write",
            paths=("/poems/write", "/poems/v2/write"),
            request=PoemRequest,
            response=Poem,
            event=PoemLine,
            fields=SupportedFields(PoemRequest, {}),
            generations=generations,
            is_streamed=lambda body: body.line_by_line,
            encoder=PoemEncoder.of,
            without_prompts=lambda body, _: msgspec.structs.replace(body, about=""),
        ),
        Endpoint(
            name="letters",
            operation="letters",
            paths=("/poems/letters",),
            request=PoemRequest,
            response=Letters,
        ),
    ),
    encode_error=apologize,
    error=Apology,
    owns=lambda path: path.startswith("/poems"),
    request_id_headers=("poem-id",),
    open=opened,
)
WITH_POEMS = (*DIALECTS, POEMS)
BODY = {"about": "hello"}


async def test_dialect_is_served_over_http_and_nats(
    nats_server: NatsServer,
    gateway_config: GatewayConfig,
    model_files: ModelFiles,
    no_shared_cluster: None,
) -> None:
    async with (
        running_cluster(nats_server, gateway_config, model_files, WITH_POEMS) as cluster,
        connected(nats_server, "client-1") as (client, raw),
    ):
        await until(lambda: has_joined(cluster.gateway))
        await check_http(Api(cluster, client, raw))
        await check_nats(Api(cluster, client, raw))


async def check_http(api: Api) -> None:
    post = api.cluster.http.post
    for path in ("/poems/write", "/poems/v2/write"):
        whole = await post(path, json=BODY)
        assert whole.json() == {"poem": ANSWER, "for_tenant": "tenant-1"}
        assert whole.headers["poem-id"]
    streamed = (await post("/poems/write", json={**BODY, "line_by_line": True})).text
    events = [json.loads(each.removeprefix("data: ")) for each in streamed.split("\n\n") if each]
    assert "".join(each["line"] for each in events) == ANSWER
    assert (await post("/poems/letters", content=b"abc")).json() == {"num_letters": 3}
    get_of = api.cluster.http.get
    assert (await get_of("/poems/known")).json() == {"known_to": "tenant-1"}
    rejected = await post("/poems/write", json={"about": 3})
    assert (rejected.status_code, rejected.json()) == (
        410,
        {
            "sorry": "invalid_request",
            "about_field": "about",
            "request": rejected.headers["poem-id"],
        },
    )
    for path in ("/poems/nothing", "/nothing"):
        missing = await post(path)
        assert ("sorry" in missing.json()) == (path != "/nothing")
    document = (await get_of("/openapi.json")).json()
    assert {"/poems/write", "/poems/letters"} <= document["paths"].keys()
    assert {"Poem", "Apology"} <= document["components"]["schemas"].keys()
    assert 'dialect="poems",model="tiny"' in (await get_of("/metrics")).text
    assert (await post("/v1/completions", json={"prompt": "hi"})).status_code == 200


async def check_nats(api: Api) -> None:
    assert await api.client.request("poem", BODY) == {"poem": ANSWER, "for_tenant": "tenant-1"}
    events = await api.events("poem", {**BODY, "line_by_line": True})
    assert "".join(each["line"] for each in events) == ANSWER
    assert json.loads((await api.reply("letters", b"abc")).data) == {"num_letters": 3}
    rejected = await all_of(await api.send("poem", {"about": 3}))
    assert json.loads(rejected[-1].data)["sorry"] == "invalid_request"
    info = json.loads((await api.raw.request("$SRV.INFO.hearth")).data)
    assert {"poem", "letters", "models"} <= {each["name"] for each in info["endpoints"]}


def test_large_body_of_the_dialect_is_prepared(model_files: ModelFiles) -> None:
    assert model_files.chat_template is not None
    setup = ProcessSetup(model_files.chat_template, str(model_files.model_dir))
    prepare = partial(body_handler, setup, None)
    job = BodyJob("poem", json.dumps({"about": "hello " * 100}).encode())
    limits = resource.getrlimit(resource.RLIMIT_AS)
    prepared = prepare(WITH_POEMS)(job)
    assert resource.getrlimit(resource.RLIMIT_AS) == limits  # of a process that has none
    assert json.loads(prepared.body)["about"] == ""
    num_tokens = len(model_files.tokenizer.encode(["hello " * 100]))
    assert len(prepared.prompts[0].token_ids) == num_tokens * TOKEN_ID_BYTES
