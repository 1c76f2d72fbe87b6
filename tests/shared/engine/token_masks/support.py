"""Engines whose sequences have grammars of the demo model's vocabulary."""

from __future__ import annotations

from collections.abc import Sequence as Tokens
from typing import Any

import msgspec

from shared.engine.batching.sequence import Sequence
from shared.engine.token_masks.mask_threads import GrammarThreads
from shared.engine.token_masks.worker_grammars import WorkerGrammars
from shared.grammar.spec import GrammarSpec
from tests.shared.grammar.support import EOS, InlineThreads, vocabulary
from tests.support.engine.rig import Rig, new_sequence, seeded

TENANT = "tenant-a"
# long enough to be preempted; its outputs differ by the noise
WORDS = GrammarSpec(kind="regex", source="(alpha|beta|gamma|[a-c]{3}) ([0-9]{2} ){4,30}end")


def grammars_of(threads: GrammarThreads | None = None) -> WorkerGrammars:
    return WorkerGrammars(vocabulary(), InlineThreads() if threads is None else threads)


def constrained(
    prompt_ids: Tokens[int],
    spec: GrammarSpec,
    grammars: WorkerGrammars,
    *,
    output_ids: Tokens[int] = (),
    tenant_id: str = TENANT,
    max_tokens: int = 200,
    seed: int = 7,
    **fields: Any,
) -> Sequence:
    sampling = msgspec.structs.replace(seeded(max_tokens, seed=seed), grammar=spec)
    sequence = new_sequence(
        prompt_ids, sampling, output_ids=output_ids, tenant_id=tenant_id, stop=(EOS,), **fields
    )
    sequence.grammar = grammars.start(tenant_id, spec, output_ids)
    return sequence


def rig_of(**options: Any) -> Rig:
    return Rig(vocab_size=vocabulary().vocab_size, **options)
