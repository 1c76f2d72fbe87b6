"""The Lua scripts, in Python on `MemoryStore`; `tests/services/gateway` compares each pair."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from services.gateway.dialects.responses.storage import scripts as responses
from services.gateway.sites.tenant_copies import PIN_LUA
from services.gateway.tenancy.api_keys import LOOK_UP
from services.gateway.tenancy.model_aliases import LOOK_UP_ALIASES
from services.gateway.tenancy.redis_memory import READ_MEMORY
from services.gateway.tenancy.refusal_audit import CLAIM_LUA
from services.gateway.tenancy.usage_counter import ADD_UP
from shared.messages import SignedCopy
from shared.model_registry.admin import SWAP_MODEL
from shared.model_registry.reader import READ_REGISTRY
from shared.store import StoreRejected
from shared.tenancy.deletion.kv_drops import ORDER_LUA, RAISE_LUA
from shared.tenancy.deletion.site_drops import CONFIRM_LUA
from shared.tenancy.deletion.tenant_data import DELETE_RECORDS_LUA
from shared.tenancy.home_tenants import (
    NAME_SITES_LUA,
    READ_EACH_LUA,
    RECORD_TOTALS_LUA,
    SWAP_EACH_LUA,
)
from shared.tenancy.leases.rates import RATES
from shared.tenancy.prefixes.pinned_prefix import (
    CHANGES_LUA,
    DELETE_LUA,
    EXPLAIN_LUA,
    NEW,
    RECORD_BYTES,
    SAVE_LUA,
    TENANTS_LUA,
    TOUCH_LUA,
)
from shared.tenancy.rate_limit import (
    APPLY_EACH_LUA,
    APPLY_LUA,
    LimitCommand,
    RateLimitCounter,
)
from shared.tenancy.site_usage import ARE_DELETED_LUA, UNMARK_LUA
from shared.tenancy.stored_responses import DELETE_SOME_LUA
from shared.tenancy.tenant import RECORD_LUA, TenantRecord, decoded_tenant
from shared.tenancy.tenant_admin import ADD_KEY_LUA, SWAP
from shared.tenancy.tenant_copy import TenantCopy

if TYPE_CHECKING:
    from tests.support.world.store import MemoryStore

Arguments = Sequence[Any]


def _fields(store: MemoryStore, key: str) -> dict[bytes, bytes]:
    fields = store.data.get(key, {})
    if not isinstance(fields, Mapping):
        raise StoreRejected("WRONGTYPE")
    return dict(fields)


def _look_up(store: MemoryStore, keys: Sequence[str], arguments: Arguments) -> list[Any]:
    fields = _fields(store, keys[0])
    tenant_id = fields.get(b"tenant_id")
    tenant = None if tenant_id is None else _fields(store, keys[1]).get(tenant_id)
    flat = [part for pair in fields.items() for part in pair]
    has_records = int(any(each in store.data for each in keys[1:]))
    return [flat, tenant, str(int(store.now())).encode(), has_records]


def _look_up_aliases(store: MemoryStore, keys: Sequence[str], arguments: Arguments) -> list[Any]:
    packed = []
    for key in keys[:2]:
        fields = _fields(store, key)
        if len(fields) > arguments[0]:
            raise StoreRejected(f"{key} has too many aliases")
        parts = [part.decode(errors="replace") for pair in fields.items() for part in pair]
        packed.append(msgspec.msgpack.encode(parts))
    return [*packed, int(any(each in store.data for each in keys[2:]))]


def _carry_out(store: MemoryStore, keys: Sequence[str], arguments: Arguments) -> list[Any]:
    return _apply(store, keys[0], msgspec.json.decode(arguments[0], type=LimitCommand))


def _carry_out_each(store: MemoryStore, keys: Sequence[str], arguments: Arguments) -> list[Any]:
    failed = []
    orders = msgspec.json.decode(arguments[0], type=list[LimitCommand])
    for index, order in enumerate(orders):
        try:
            _apply(store, keys[2 * index], order)
        except StoreRejected as error:
            failed.append([index, error.message.encode()])
    return failed


def _apply(store: MemoryStore, key: str, order: LimitCommand) -> list[Any]:
    meter = store.data.setdefault(key, RateLimitCounter())
    if not isinstance(meter, RateLimitCounter):
        raise StoreRejected("WRONGTYPE")
    reading = meter.apply(order, store.now())
    used = [str(reading.used[name]).encode() for name in RATES]
    leased = b"" if reading.leased is None else msgspec.json.encode(reading.leased)
    rejected_by, wait_s = reading.rejected_by.encode(), str(reading.wait_s).encode()
    return [rejected_by, wait_s, reading.num_open, leased, *used]


def _add_up(store: MemoryStore, keys: Sequence[str], arguments: Arguments) -> bytes:
    number, last = int(arguments[0]), _fields(store, keys[0])
    if int(last.get(b"number", 0)) >= number:
        return last[b"refused"]
    refused = ""
    for index, key in enumerate(keys[3:]):
        field, amount, owner = arguments[3 + 3 * index : 6 + 3 * index]
        if owner.encode() in store.data.get(keys[2], {}):
            continue
        fields = store.data.setdefault(key, {})
        try:
            fields[field.encode()] = str(int(fields.get(field.encode(), 0)) + amount).encode()
        except (ValueError, AttributeError):
            refused += f"{index} "
            continue
        if "/" in key:
            marks = store.data.setdefault(keys[1], {})
            marks[key.encode()] = str(int(marks.get(key.encode(), 0)) + 1).encode()
    store.data[keys[0]] = {b"number": str(number).encode(), b"refused": refused.encode()}
    return refused.encode()


def _swap(store: MemoryStore, keys: Sequence[str], arguments: Arguments) -> int:
    field, before, after = arguments
    fields = store.data.setdefault(keys[0], {})
    if fields.get(field.encode(), b"") != before:
        return 0
    fields[field.encode()] = after
    return 1


def _add_key(store: MemoryStore, keys: Sequence[str], arguments: Arguments) -> bytes:
    tenant_id, record, generation, key_id, digest, created_at = arguments
    if record:
        store.apply([("HSETNX", keys[0], tenant_id, record)])
    if tenant_id.encode() not in store.data.get(keys[0], {}):
        return b"unknown"
    owner = _fields(store, keys[2]).get(b"tenant_id", tenant_id.encode())
    if owner != tenant_id.encode():
        return b"taken"
    fields = ("tenant_id", tenant_id, "key_id", key_id, "created_at", created_at)
    store.apply(
        [
            ("SETNX", keys[1], generation),
            ("HSET", keys[2], *fields),
            ("HSET", keys[3], key_id, digest),
        ]
    )
    return b""


def _are_deleted(store: MemoryStore, keys: Sequence[str], arguments: Arguments) -> int:
    return int(all(each.encode() in store.data.get(keys[0], {}) for each in arguments))


def _read_each(store: MemoryStore, keys: Sequence[str], arguments: Arguments) -> list[Any]:
    rows = [[part for pair in _fields(store, key).items() for part in pair] for key in keys]
    return [str(int(store.now())).encode(), rows]


def _swap_each(store: MemoryStore, keys: Sequence[str], arguments: Arguments) -> list[bytes]:
    triples = zip(arguments[::3], arguments[1::3], arguments[2::3], strict=True)
    return [
        field
        for field, before, after in triples
        if field not in _fields(store, keys[1])
        or not _swap(store, keys, (field.decode(), before, after))
    ]


def _pin_key(store: MemoryStore, keys: Sequence[str], arguments: Arguments) -> bytes:
    site, key = arguments
    return store.data.setdefault(keys[0], {}).setdefault(site.encode(), key)


def _name_sites(store: MemoryStore, keys: Sequence[str], arguments: Arguments) -> int:
    last = store.data.get(keys[1], b"")
    store.apply([("HSET", keys[0], each, last) for each in arguments])
    return 0


def _record_totals(store: MemoryStore, keys: Sequence[str], arguments: Arguments) -> int:
    name_at_site, site, _, max_totals, *pairs = arguments
    named = store.data.get(keys[1], {}).get(name_at_site.encode())
    if named is None:
        return 0
    confirmed = int(store.data.get(keys[2], {}).get(site.encode(), 0))
    if confirmed < int(named or 0) <= int(store.data.get(keys[3], b"0")):
        return -1
    fields = store.data.setdefault(keys[0], {})
    for name, total in zip(pairs[::2], pairs[1::2], strict=True):
        if name.encode() in fields or len(fields) < max_totals:
            most = max(total, int(fields.get(name.encode(), -1)))
            fields[name.encode()] = str(most).encode()
    return 1


def _unmark(store: MemoryStore, keys: Sequence[str], arguments: Arguments) -> int:
    name, value = arguments
    if store.data.get(keys[0], {}).get(name.encode()) == value:
        del store.data[keys[0]][name.encode()]
    return 0


def _read_registry(store: MemoryStore, keys: Sequence[str], arguments: Arguments) -> list[Any]:
    known, max_models = arguments
    number, generation = (store.data.get(each, b"") for each in keys[1:3])
    version = generation + b"/" + number
    head = [int(any(each in store.data for each in keys[1:])), int(bool(number)), version]
    if version == known:
        return head
    fields = _fields(store, keys[0])
    if len(fields) > max_models:
        raise StoreRejected(f"{keys[0]} has too many models")
    return [*head, [part for pair in fields.items() for part in pair]]


def _swap_model(store: MemoryStore, keys: Sequence[str], arguments: Arguments) -> bytes:
    name, before, after, max_models, now = arguments
    fields = _fields(store, keys[0])
    if fields.get(name.encode(), b"") != before:
        return b"changed"
    if after and not before and len(fields) >= max_models:
        return b"full"
    write = ("HSET", keys[0], name, after) if after else ("HDEL", keys[0], name)
    store.apply([write, ("SETNX", keys[1], str(now)), ("INCRBY", keys[1], 1)])
    return b"stored"


def _claim_refusals(store: MemoryStore, keys: Sequence[str], arguments: Arguments) -> int:
    name, count, _ = arguments
    fields = store.data.setdefault(keys[0], {})
    more = int(count) - int(fields.get(name.encode(), b"0"))
    if more <= 0:
        return 0
    fields[name.encode()] = str(count).encode()
    return more


def _may_store(
    store: MemoryStore,
    keys: Sequence[str],
    tenant_id: str,
    created_at: float,
    region: str,
    classes: str,
) -> bool:
    if tenant_id == "":
        return True
    is_copied = "/" in tenant_id
    data = _fields(store, keys[int(is_copied)]).get(tenant_id.encode())
    record = None if data is None else _copied(data) if is_copied else decoded_tenant(data)
    if record is None or record.is_zero_retention or record.created_at != created_at:
        return False
    if record.region_class and f",{record.region_class}," not in classes:
        return False
    allowed = record.allowed_regions
    return allowed is None or (region != "" and region in allowed)


def _copied(data: bytes) -> TenantRecord:
    signed = msgspec.msgpack.decode(data, type=SignedCopy)
    return msgspec.msgpack.decode(signed.body, type=TenantCopy).record


def _save_prefix(store: MemoryStore, keys: Sequence[str], arguments: Arguments) -> bytes:
    name, entry, body, ends_at, created_at, tenant_id, max_prefixes, max_bytes, stem = arguments[:9]
    now, max_all, replaces, *writer = arguments[9:]
    if writer and not _may_store(store, keys[8:], tenant_id, *writer):
        return b"forbidden"
    entries = _fields(store, keys[0])
    digest = _digest_of(entries.get(name.encode()))
    if name.encode() in entries if replaces == NEW else replaces and replaces != digest:
        return b"changed"
    others = [each for each in entries if each != name.encode()]
    if len(others) >= max_prefixes:
        return b"too_many"
    sizes = [len(store.data.get(stem + each.decode(errors="replace"), b"")) for each in others]
    if len(body) + sum(sizes) > max_bytes:
        return b"too_large"
    for key, score in [*store.data.get(keys[7], {}).items()]:
        if score <= now:
            _set_prefix_size(store, keys[6:8], key.decode(), 0, 0)
    size, all_sizes = len(body) + RECORD_BYTES, _fields(store, keys[6])
    held = int(all_sizes.get(b"total", 0)) - int(all_sizes.get(keys[1].encode(), 0))
    if 0 <= max_all < held + size:
        return b"full"
    ending = ("EX", max(1, ends_at - int(now))) if ends_at else ()
    store.apply(
        [
            ("SET", keys[1], body, *ending),
            ("HSET", keys[0], name, entry),
            ("HDEL", keys[5], name),
            ("ZADD", keys[2], created_at, tenant_id),
        ]
    )
    _set_prefix_size(store, keys[6:8], keys[1], size, ends_at)
    _record_change(store, keys[3:5], tenant_id)
    return b"saved"


def _digest_of(entry: bytes | None) -> str | None:
    return None if entry is None else msgspec.msgpack.decode(entry)[0]


def _delete_prefix(store: MemoryStore, keys: Sequence[str], arguments: Arguments) -> None:
    name, tenant_id, digest = arguments
    if digest and digest != _digest_of(_fields(store, keys[0]).get(name.encode())):
        return
    store.apply([("HDEL", keys[0], name), ("DEL", keys[1]), ("HDEL", keys[5], name)])
    if not _fields(store, keys[0]):
        store.apply([("ZREM", keys[2], tenant_id)])
    _set_prefix_size(store, keys[6:8], keys[1], 0, 0)
    _record_change(store, keys[3:5], tenant_id)


def _explain_prefixes(store: MemoryStore, keys: Sequence[str], arguments: Arguments) -> None:
    for name, reason in zip(arguments[1::2], arguments[2::2], strict=True):
        if reason and name.encode() in store.data.get(keys[1], {}):
            store.apply([("HSET", keys[0], name, reason)])
        else:
            store.apply([("HDEL", keys[0], name)])
    store.apply([("EXPIRE", keys[0], arguments[0])])


def _set_prefix_size(
    store: MemoryStore, keys: Sequence[str], key: str, size: int, ends_at: int
) -> None:
    before = int(_fields(store, keys[0]).get(key.encode(), 0))
    store.apply(
        [
            ("HINCRBY", keys[0], "total", size - before),
            ("HSET", keys[0], key, size) if size else ("HDEL", keys[0], key),
            ("ZADD", keys[1], ends_at, key) if ends_at else ("ZREM", keys[1], key),
        ]
    )


def _record_change(store: MemoryStore, keys: Sequence[str], tenant_id: str) -> None:
    store.apply([("INCRBY", keys[0], 1)])
    store.apply([("ZADD", keys[1], int(store.data[keys[0]]), tenant_id)])


def _changes(store: MemoryStore, keys: Sequence[str], arguments: Arguments) -> list[Any]:
    version, known = int(store.data.get(keys[0], 0)), int(arguments[0])
    if version == known or known < 0 or version < known:
        return [version, int(version == known)]
    scores = store.data.get(keys[1], {})
    return [version, 1, *(each for each, score in scores.items() if score > known)]


def _tenants_page(store: MemoryStore, keys: Sequence[str], arguments: Arguments) -> list[Any]:
    return [b"0", *store.data.get(keys[0], {})]


def _tenant_record(store: MemoryStore, keys: Sequence[str], arguments: Arguments) -> bytes | None:
    return _fields(store, keys[0]).get(arguments[0].encode())


def _order_drop(store: MemoryStore, keys: Sequence[str], arguments: Arguments) -> int:
    store.apply([("SETNX", keys[0], arguments[1]), ("INCRBY", keys[0], 1)])
    number = int(store.data[keys[0]])
    store.apply([("HSET", keys[1], number, arguments[0])])
    return number


def _raise_number(store: MemoryStore, keys: Sequence[str], arguments: Arguments) -> int:
    if int(arguments[0]) > int(store.data.get(keys[0], b"0")):
        store.apply([("SET", keys[0], arguments[0])])
    return 0


def _confirm_drops(store: MemoryStore, keys: Sequence[str], arguments: Arguments) -> int:
    site, number = arguments
    last = int(store.data.get(keys[1], b"0"))
    before = int(store.data.get(keys[0], {}).get(str(site).encode(), b"-1"))
    if int(number) > last or int(number) <= before <= last:
        return 0
    store.apply([("HSET", keys[0], site, number)])
    return 1


def _delete_records(store: MemoryStore, keys: Sequence[str], arguments: Arguments) -> int:
    names = [*store.data.get(keys[0], {})][: int(arguments[0])]
    store.apply([("DEL", keys[1] + each.decode()) for each in names])
    store.apply([("ZREM", keys[0], *names)])
    return len(names)


# Of stored responses, without the bounds of bytes.


def _save_response(store: MemoryStore, keys: Sequence[str], arguments: Arguments) -> list[Any]:
    response_id, data, previous, life_s = arguments[:4]
    tenant_id, region, _, classes, created_at = arguments[6:]
    if not _may_store(store, keys[7:], tenant_id, created_at, region, classes):
        return [b"forbidden", 0]
    store.apply(
        [
            ("HSET", keys[0] + response_id, "data", data, "previous", previous),
            ("EXPIRE", keys[0] + response_id, life_s),
        ]
    )
    return [b"stored", 0]


def _response_sizes(store: MemoryStore, keys: Sequence[str], arguments: Arguments) -> list[Any]:
    found = (_fields(store, keys[0] + each).get(b"data") for each in arguments)
    return [None if data is None else len(data) for data in found]


def _read_responses(store: MemoryStore, keys: Sequence[str], arguments: Arguments) -> list[Any]:
    return [_fields(store, keys[0] + each).get(b"data") for each in arguments[1:]]


def _delete_response(store: MemoryStore, keys: Sequence[str], arguments: Arguments) -> int:
    is_known = bool(_fields(store, keys[0] + arguments[0]))
    store.apply([("DEL", keys[0] + arguments[0])])
    return int(is_known)


def _response_chain(store: MemoryStore, keys: Sequence[str], arguments: Arguments) -> Any:
    response_id, max_count = arguments
    found: list[Any] = []
    while len(found) < 2 * max_count:
        fields = _fields(store, keys[0] + response_id)
        if not fields:
            return b"unknown"
        found += [response_id.encode(), len(fields[b"data"])]
        response_id = fields[b"previous"].decode()
        if not response_id:
            return found
    return b"too_long"


def _delete_responses(store: MemoryStore, keys: Sequence[str], arguments: Arguments) -> int:
    store.apply([("DEL", each) for each in [*store.data] if each.startswith(keys[0])])
    return 0


SCRIPTS: dict[str, Callable[[MemoryStore, Sequence[str], Arguments], Any]] = {
    LOOK_UP: _look_up,
    LOOK_UP_ALIASES: _look_up_aliases,
    APPLY_LUA: _carry_out,
    APPLY_EACH_LUA: _carry_out_each,
    ADD_UP: _add_up,
    SAVE_LUA: _save_prefix,
    DELETE_LUA: _delete_prefix,
    EXPLAIN_LUA: _explain_prefixes,
    TOUCH_LUA: lambda store, keys, arguments: _record_change(store, keys, arguments[0]),
    CHANGES_LUA: _changes,
    CLAIM_LUA: _claim_refusals,
    TENANTS_LUA: _tenants_page,
    READ_MEMORY: lambda *_: b"used_memory:0\r\nmaxmemory:0\r\n",
    RECORD_LUA: _tenant_record,
    SWAP: _swap,
    ADD_KEY_LUA: _add_key,
    ARE_DELETED_LUA: _are_deleted,
    READ_EACH_LUA: _read_each,
    SWAP_EACH_LUA: _swap_each,
    PIN_LUA: _pin_key,
    NAME_SITES_LUA: _name_sites,
    RECORD_TOTALS_LUA: _record_totals,
    UNMARK_LUA: _unmark,
    CONFIRM_LUA: _confirm_drops,
    ORDER_LUA: _order_drop,
    RAISE_LUA: _raise_number,
    DELETE_RECORDS_LUA: _delete_records,
    READ_REGISTRY: _read_registry,
    SWAP_MODEL: _swap_model,
    responses.SAVE: _save_response,
    DELETE_SOME_LUA: _delete_responses,
    responses.SIZES: _response_sizes,
    responses.READ: _read_responses,
    responses.DELETE: _delete_response,
    responses.CHAIN: _response_chain,
}
