"""Makes a backup of a Redis in use."""

from __future__ import annotations

import secrets
from collections import Counter
from pathlib import Path

from shared.backup.backup_file import BackupHeader, FileKey, writing_backup
from shared.backup.collect import collect, without_texts
from shared.backup.records import StoredPrefix, StoredResponse, StoredTenant
from shared.errors import ConfigError
from shared.lifecycle.release import installed_release
from shared.store import Store
from shared.tenancy.tenant import GENERATION

SALT_BYTES = 16  # BLAKE2b's


async def make_backup(
    store: Store, path: Path, now: float, *, key_text: bytes | None = None, with_texts: bool = True
) -> Counter[str]:
    """Writes a backup, and returns what is in it, by kind. `now` is in Unix seconds. Raises
    ConfigError, also for a Redis without records, and StoreUnavailable.
    """
    generation = await store.get(GENERATION)
    if generation is None:
        raise ConfigError("Redis has no tenant: there is nothing to back up")
    salt = secrets.token_hex(SALT_BYTES)
    key = None if key_text is None else FileKey(key_text, salt)
    header = BackupHeader(
        backup_id=secrets.token_hex(8),
        release=installed_release(),
        generation=generation.decode(),
        made_at=now,
        salt="" if key is None else salt,
        key_check="" if key is None else key.check,
    )
    withdrawn = set[str]()
    while True:
        counts, holders = Counter[str](), set[str]()
        try:
            with writing_backup(path, header, key) as add:
                async for each in collect(store, now, with_texts=with_texts, withdrawn=withdrawn):
                    add(each)
                    match each:
                        case StoredTenant(keys=keys):
                            counts.update({"tenants": 1, "keys": len(keys)})
                        case StoredResponse(tenant_id=holder):
                            counts["stored responses"] += 1
                            holders.add(holder)
                        case StoredPrefix(tenant_id=holder):
                            counts["named prefixes"] += 1
                            holders.add(holder)
                if late := await without_texts(store, holders):
                    raise _TextsWithdrawn(late)
        except _TextsWithdrawn as error:
            withdrawn |= error.tenants
        else:
            return counts


class _TextsWithdrawn(Exception):
    """Tenants whose texts are in the backup allow none any more: it is made again without them."""

    def __init__(self, tenants: set[str]) -> None:
        super().__init__()
        self.tenants = tenants
