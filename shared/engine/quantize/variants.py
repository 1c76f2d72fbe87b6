"""The models that a report on quality compares, each loaded with a cache for one prompt."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from shared.engine.executors.load import load_executor, resolve_device
from shared.engine.executors.loading.model_loading import kv_layout_of
from shared.engine.executors.local_executor import LocalExecutor
from shared.engine.kv.kv_dtype import resolve_kv_dtype
from shared.engine.models.checkpoint_config import read_config
from shared.engine.quantize.compare import CHUNK_TOKENS, num_blocks
from shared.errors import ConfigError
from shared.numerics import KvDtype

BLOCK_TOKENS = 16
DTYPE = "bfloat16"  # dtype of activations in which quantized models are compared
JUDGED, PLAIN, ORIGINAL = "judged", "plain", "original"


@dataclass(frozen=True, slots=True)
class Variant:
    """A checkpoint, with KV in one dtype."""

    model_dir: Path
    kv_dtype: KvDtype

    def load(self, num_tokens: int, *, device: str, load_format: str) -> LocalExecutor:
        """Raises CheckpointError, ConfigError."""
        config, target = read_config(self.model_dir), resolve_device(device)
        kv_dtype = resolve_kv_dtype(self.kv_dtype, DTYPE, config, target)
        layout = kv_layout_of(config, kv_dtype, BLOCK_TOKENS)
        return load_executor(
            self.model_dir,
            device,
            dtype=DTYPE,
            kv_dtype=self.kv_dtype,
            block_size=BLOCK_TOKENS,
            kv_cache_bytes=num_blocks(layout, num_tokens) * layout.block_bytes,
            max_batch_tokens=CHUNK_TOKENS,
            max_sequences=1,
            load_format=load_format,
        )


@dataclass(frozen=True, slots=True)
class Comparisons:
    """Variants to compare. `pairs` maps a difference to names of variants, the reference first."""

    variants: Mapping[str, Variant]
    pairs: Mapping[str, tuple[str, str]]

    @classmethod
    def of(cls, model_dir: Path, against: Path | None, kv_dtype: KvDtype) -> Comparisons:
        """Raises ConfigError if nothing would differ."""
        variants = {PLAIN: Variant(model_dir, "bf16")}
        pairs = {}
        if kv_dtype != "bf16":
            variants[JUDGED] = Variant(model_dir, kv_dtype)
            pairs[f"KV in {kv_dtype}"] = PLAIN, JUDGED
        if against is not None:
            variants[ORIGINAL] = Variant(against, "bf16")
            pairs["weights"] = ORIGINAL, PLAIN
        if len(variants) == 3:
            pairs[f"weights, KV in {kv_dtype}"] = ORIGINAL, JUDGED
        if not pairs:
            raise ConfigError("nothing to compare: give --kv-dtype fp8, or --against")
        return cls(variants, pairs)

    @contextmanager
    def loaded(
        self, num_tokens: int, *, device: str, load_format: str
    ) -> Iterator[dict[str, LocalExecutor]]:
        """Loads all variants at once. Yields executors by name. Raises CheckpointError,
        ConfigError.
        """
        for variant in self.variants.values():
            read_config(variant.model_dir)  # a wrong folder is named before another one is loaded
        executors: dict[str, LocalExecutor] = {}
        try:
            for name, variant in self.variants.items():
                executors[name] = variant.load(num_tokens, device=device, load_format=load_format)
            _expect_one_vocabulary(executors, self.variants)
            yield executors
        finally:
            asyncio.run(_close([*executors.values()]))


def _expect_one_vocabulary(
    executors: Mapping[str, LocalExecutor], variants: Mapping[str, Variant]
) -> None:
    sizes = {name: executor.vocab_size for name, executor in executors.items()}
    if len(set(sizes.values())) > 1:
        named = ", ".join(f"{variants[name].model_dir} {size}" for name, size in sizes.items())
        raise ConfigError(f"vocabularies differ: {named}", param="against")
    headless = [name for name, executor in executors.items() if not executor.has_head]
    if headless:
        raise ConfigError(f"{variants[headless[0]].model_dir} has no output head")


async def _close(executors: Sequence[LocalExecutor]) -> None:
    for executor in executors:
        await executor.close()
