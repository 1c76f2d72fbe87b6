"""Moves a name from one revision of its model to another: pure changes of a RegisteredModel.

    add the name              r1 alone, which serves all requests
    add a revision            staged: weight 0, serves nothing
      with a canary of P %    it gets P % of new requests; the others share the rest as before
    share(R, P %)             the same for a revision that is there
    promote(R)                R serves all requests, once it has a digest: see below
    remove(R)                 the others share its requests in proportion to their weights

A revision is *loaded* once a host has recorded its digest; others serve nothing, whatever their
weight. Promotion of one that is not loaded, while another one serves, waits: it is *pending*, and
`with_digest` completes it in the same change that records the digest. So a name is never without a
revision that serves. A later promotion replaces a pending one.

A completed promotion removes the revisions that had a weight and those that are older; a newer,
staged one stays. With `keep` all stay, with weight 0, so that promoting the old one undoes it.
What is removed still ends its running requests: gateways and workers hold what they have begun.

Refused: a change that leaves no revision with a weight; a canary while a promotion is pending,
whose share would not be its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import accumulate

import msgspec

from shared.errors import ConfigError
from shared.model_registry.record import MAX_REVISIONS, RegisteredModel, RegisteredRevision


def choose_revision(model: RegisteredModel, sample: float) -> RegisteredRevision | None:
    """Returns the revision of a request, by weight, or None if no revision with a weight has a
    digest yet. `sample` is uniform in [0, 1).
    """
    loaded = [each for each in model.revisions if each.digest and each.weight > 0]
    if not loaded:
        return None
    bounds = list(accumulate(each.weight for each in loaded))
    chosen = (i for i, bound in enumerate(bounds) if sample * bounds[-1] < bound)
    return loaded[next(chosen, len(loaded) - 1)]


def share_of(model: RegisteredModel, revision: RegisteredRevision) -> float:
    """Returns the share of new requests, once all revisions are loaded: 0 to 1."""
    return revision.weight / sum(each.weight for each in model.revisions)


def revision_of(model: RegisteredModel, name: str) -> RegisteredRevision:
    """Returns a revision of the model. Raises ConfigError if it has none of that name."""
    for each in model.revisions:
        if each.name == name:
            return each
    known = ", ".join(each.name for each in model.revisions)
    raise ConfigError(f"the model {model.name!r} has no revision {name!r}: it has {known}")


def next_revision_name(model: RegisteredModel) -> str:
    """Returns r and a number above those that the model has."""
    numbers = (each.name[1:] for each in model.revisions if each.name.startswith("r"))
    return f"r{1 + max((int(each) for each in numbers if each.isdecimal()), default=0)}"


def with_revision(model: RegisteredModel, added: RegisteredRevision) -> RegisteredModel:
    """Returns the model with one more revision, staged."""
    if any(each.name == added.name for each in model.revisions):
        raise ConfigError(
            f"the model {model.name!r} has a revision {added.name!r} already: choose another name"
        )
    if len(model.revisions) >= MAX_REVISIONS:
        raise ConfigError(
            f"the model {model.name!r} has {MAX_REVISIONS} revisions, which is the most: "
            "remove one with `hearth model remove --revision`"
        )
    staged = msgspec.structs.replace(added, weight=0.0, promotion="")
    return _replaced(model, (*model.revisions, staged))


def with_share(model: RegisteredModel, name: str, percent: float) -> RegisteredModel:
    """Returns the model with `percent` of new requests for the revision; the others share the
    rest in proportion.
    """
    if not 0 < percent < 100:
        raise ConfigError(
            f"a canary of {percent:g} % is not between 0 and 100: the others would get "
            "nothing or all; `hearth model promote` moves all requests"
        )
    for pending in (each for each in model.revisions if each.promotion):
        raise ConfigError(
            f"revision {pending.name!r} of {model.name!r} is being promoted: a canary can follow "
            "once a host has loaded it, or after `hearth model remove --revision`"
        )
    revision_of(model, name)
    rest = sum(each.weight for each in model.revisions if each.name != name)
    if rest == 0:
        raise ConfigError(
            f"no other revision of {model.name!r} has a weight to take {100 - percent:g} % of the "
            "requests"
        )

    def weight_of(revision: RegisteredRevision) -> float:
        return percent if revision.name == name else revision.weight * (100 - percent) / rest

    return _weighted(model.revisions, weight_of, model)


def promoted(model: RegisteredModel, name: str, *, keep: bool) -> RegisteredModel:
    """Returns the model with all requests for the revision: now, or once it has a digest if
    another one serves.
    """
    revision = revision_of(model, name)
    is_served = any(each.digest and each.weight > 0 for each in model.revisions)
    if revision.digest or not is_served:
        return _completed(model, name, keep=keep)
    pending = msgspec.structs.replace(revision, promotion="keep" if keep else "replace")
    others = (msgspec.structs.replace(each, promotion="") for each in model.revisions)
    return _replaced(model, (pending if each.name == name else each for each in others))


def without_revision(model: RegisteredModel, name: str) -> RegisteredModel:
    revision_of(model, name)
    left = tuple(each for each in model.revisions if each.name != name)
    if not left:
        raise ConfigError(
            f"{name!r} is the only revision of {model.name!r}: "
            f"`hearth model remove {model.name}` removes the model"
        )
    changed = _replaced(model, left)
    if any(each.weight > 0 for each in left):
        return changed
    for pending in (each for each in left if each.promotion):
        return _completed(changed, pending.name, keep=pending.promotion == "keep")
    raise ConfigError(
        f"no revision of {model.name!r} would serve requests without {name!r}: "
        f"promote {left[-1].name!r} first"
    )


def with_digest(model: RegisteredModel, name: str, digest: str) -> RegisteredModel:
    """Returns the model with the digest of the revision's weights, unless it has one, and
    completes its promotion.
    """
    revision = revision_of(model, name)
    if revision.digest:
        return model
    loaded = msgspec.structs.replace(revision, digest=digest)
    model = _replaced(model, (loaded if each.name == name else each for each in model.revisions))
    if not loaded.promotion:
        return model
    return _completed(model, name, keep=loaded.promotion == "keep")


def _completed(model: RegisteredModel, name: str, *, keep: bool) -> RegisteredModel:
    names = [each.name for each in model.revisions]
    newer = names[names.index(name) + 1 :]
    retained = (
        each
        for each in model.revisions
        if keep or each.name == name or (each.name in newer and each.weight == 0)
    )
    return _weighted(retained, lambda each: float(each.name == name), model)


def _weighted(
    revisions: Iterable[RegisteredRevision],
    weight_of: Callable[[RegisteredRevision], float],
    model: RegisteredModel,
) -> RegisteredModel:
    changed = (
        msgspec.structs.replace(each, weight=weight_of(each), promotion="") for each in revisions
    )
    return _replaced(model, changed)


def _replaced(model: RegisteredModel, revisions: Iterable[RegisteredRevision]) -> RegisteredModel:
    return msgspec.structs.replace(model, revisions=tuple(revisions))
