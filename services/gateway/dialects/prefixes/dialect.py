"""`/v1/prefixes` as a dialect: `routes.py` has its paths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from services.gateway.dialects.dialect import Dialect, DialectParts, OpenDialect
from services.gateway.dialects.openai.errors import ErrorEnvelope, encode_error
from services.gateway.dialects.prefixes.large_bodies import DRY_RUN, PREFIX, check_prefix_body
from services.gateway.dialects.prefixes.prefix_pixels import PrefixPixels
from services.gateway.dialects.prefixes.prefix_tokenizer import PrefixTokenizer, Tokens
from services.gateway.dialects.prefixes.public_prefix_watcher import PublicPrefixWatcher
from services.gateway.dialects.prefixes.routes import PrefixRoutes
from services.gateway.dialects.prefixes.store import PrefixStore
from services.gateway.models.served_text import ServedModel
from services.gateway.request.preparer import Preparer
from services.gateway.request.prompt import ChatPrompt
from shared.packing import unpack_token_ids
from shared.regions.region_classes import region_classes


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenPrefixDialect(OpenDialect):
    store: PrefixStore
    watcher: PublicPrefixWatcher


def _open(parts: DialectParts) -> OpenDialect:
    preparer, memory = parts.preparer, parts.tenancy.redis_memory
    store, models = parts.tenancy.stores.slow, parts.models.served

    def reader_of(model: ServedModel) -> PrefixTokenizer:
        return PrefixTokenizer(
            partial(_tokens, preparer, model),
            preparer.max_payload_bytes,
            model.text.files.longest_token_chars,
        )

    prefixes = PrefixStore(
        store,
        health_monitor=parts.health_monitor,
        models=models,
        names=parts.models.names,
        reader_of=reader_of,
        wall_clock=parts.wall_clock,
        max_all_bytes=lambda: memory.max_prefix_bytes,
        region=parts.config.region,
        region_classes=parts.config.own_classes,
        public=preparer.public,
        on_refused=parts.tenancy.refusal_audit.refused,
        latest=parts.tenancy.copied.latest,
    )
    pixels = PrefixPixels(
        store,
        record_of=parts.tenancy.record_of,
        models=models,
        preparer=preparer,
        region=parts.config.region,
        classes=region_classes(parts.config.region_classes),
    )
    parts.pixels.read_stored(pixels.find)
    watcher = PublicPrefixWatcher(
        preparer.public,
        store,
        parts.clock,
        models=models,
        reader_of=reader_of,
        wall_clock=parts.wall_clock,
    )
    return OpenPrefixDialect(
        store=prefixes,
        watcher=watcher,
        handlers=lambda http: PrefixRoutes(
            http, preparer, prefixes, models.default_name
        ).handlers(),
        tasks=(watcher.run,),
    )


async def _tokens(
    preparer: Preparer, model: ServedModel, tenant_id: str, prompts: Sequence[ChatPrompt]
) -> Tokens:
    """Returns the tokens of conversations that begin alike, and their images. Raises as `Preparer`
    does.
    """
    if not prompts[0].images:
        return [await preparer.tokenize_chat(model, tenant_id, each) for each in prompts], ()
    found = await preparer.prompts_with_images(model, tenant_id, prompts, has_pixels=False)
    images = [each.part for each in found[0].images]
    return [unpack_token_ids(each.token_ids) for each in found], images


DIALECT = Dialect(
    name="openai",
    title="Prefixes",
    about="System prompts that are computed ahead and pinned in the workers' caches.",
    endpoints=(),
    encode_error=encode_error,
    error=ErrorEnvelope,
    jobs=dict.fromkeys((PREFIX, DRY_RUN), check_prefix_body),
    open=_open,
)
