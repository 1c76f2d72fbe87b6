"""Checks the checkpoints of a command before it starts or changes anything."""

from __future__ import annotations

from pathlib import Path

from services.local.plan import UpOptions, check_options
from shared.config import expert_split
from shared.engine.checkpoint_check import check_checkpoint
from shared.engine.model_config.model_config import ModelConfig
from shared.engine.planning.memory_plan import plan_memory
from shared.errors import CheckpointError
from shared.subjects import CredentialRole
from shared.tokenizer.checkpoint_folder import check_folder, check_tokenizer

ITEM_BYTES = 2


def check_models(options: UpOptions) -> None:
    """Checks the models and the options of a local cluster, within a second. Models of the hub that
    a host will download are not checked. Raises ConfigError and CheckpointError.
    """
    needs_weights = options.load_format != "dummy"
    if not options.model_dir.is_dir():
        check_folder(options.model_dir, needs_weights=needs_weights)
    check_options(options)
    for each in options.models:
        if Path(each.source).exists():
            try:
                check_checkpoint(Path(each.source), needs_weights=True)
            except CheckpointError as error:
                raise CheckpointError(f"model {each.name!r}: {error.message}") from None
    if not options.models:
        config = check_checkpoint(options.model_dir, needs_weights=needs_weights).config
        check_tokenizer(options.model_dir)
        _check_ranks(config, options)


def check_source(source: Path) -> None:
    """Checks a source that this machine has. Raises CheckpointError."""
    check_checkpoint(source, needs_weights=True)


def _check_ranks(config: ModelConfig, options: UpOptions) -> None:
    """Raises ConfigError for ranks between which the model cannot be cut."""
    counts: dict[CredentialRole, int]
    counts = {
        "prefill": options.num_prefill,
        "decode": options.num_decode,
        "worker": options.num_both,
    }
    for tp in {options.tp_of(role) for role, count in counts.items() if count}:
        plan_memory(
            config,
            tp=tp,
            pp=options.pp,
            item_bytes=ITEM_BYTES,
            experts=expert_split(options.experts),
        )
