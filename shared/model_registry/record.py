"""The models that a cluster can serve: `hearth model` writes the records, gateways and hosts read
them.

    hearth:model:catalogue          hash: name → its RegisteredModel as JSON
    hearth:model:catalogue:version  a counter that every change increments

A name has one revision, or more while it moves from one to another (`revisions.py`). The revision
of a request is sampled by weight; its worker is found by name and digest.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from shared.numerics import KvDtype

REGISTRY = "hearth:model:catalogue"
REGISTRY_VERSION = "hearth:model:catalogue:version"
MAX_MODELS = 1024
MAX_REVISIONS = 4

MAX_WEIGHT = 1e6

Promotion = Literal["", "replace", "keep"]
WeightForm = Literal["auto", "dense", "compressed"]
Text = Annotated[str, Meta(min_length=1, max_length=1024)]


class RegisteredRevision(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A revision of a model. `source` is a directory, a bundle or a hub id, as hosts see it.

    `digest` is that of its weights, as workers announce it (`ModelCard.revision`): the first host
    that loads the source records it, and any other content of the source is refused from then on.
    `weight` is the share of new requests, relative to the other revisions. With `promotion` it
    takes over once it has a digest; the revisions that it replaces are then removed, or kept
    without weight.
    """

    name: Text
    source: Text
    digest: str = ""
    weight: Annotated[float, Meta(ge=0, le=MAX_WEIGHT)] = 1.0
    promotion: Promotion = ""
    added_at: Annotated[float, Meta(ge=0)] = 0.0  # unix seconds


class RegisteredModel(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A model of the registry. Only `tenants` may use it; None means every tenant that
    may use its name.

    `max_context_tokens` is a limit; None means what the model and the memory allow. If two models
    compete for memory, the one with the higher `priority` stays hot. If `is_pinned`, it is never
    parked while hot.
    """

    name: Text
    revisions: Annotated[
        tuple[RegisteredRevision, ...], Meta(min_length=1, max_length=MAX_REVISIONS)
    ]
    tenants: Annotated[tuple[str, ...], Meta(max_length=1024)] | None = None
    max_context_tokens: Annotated[int, Meta(ge=1)] | None = None
    weights: WeightForm = "auto"
    kv_dtype: KvDtype = "auto"  # dtype of stored KV
    num_standby: Annotated[int, Meta(ge=0, le=64)] = 0  # hosts that keep it in standby or hot
    priority: Annotated[int, Meta(ge=-100, le=100)] = 0
    is_pinned: bool = False
    created_at: Annotated[float, Meta(ge=0)] = 0.0  # unix seconds
