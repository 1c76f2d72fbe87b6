"""Recognises what is given in place of a checkpoint: another format, or only a part of one."""

from __future__ import annotations

import json
from pathlib import Path

from shared.errors import CheckpointError
from shared.tokenizer.checkpoint_file import exists, read_checkpoint_file
from shared.tokenizer.tokenizer_file import RANKS_FILE, TOKENIZER_FILE, tokenizer_file

WEIGHTS, GGUF, ADAPTER = ".safetensors", ".gguf", "adapter_config.json"
PICKLES = (".bin", ".pt", ".pth")
FILE_SUFFIXES = (WEIGHTS, GGUF, *PICKLES)  # of files, which no id on the hub has
EXPECTED = "expected a checkpoint directory, with config.json, *.safetensors and tokenizer.json"
SERVED = (
    "served are dense checkpoints, compressed-tensors (INT4, INT8, FP8), fp8, fbgemm_fp8, awq "
    "(gemm), gptq and mxfp4"
)
NO_GGUF = (
    "GGUF is not served: safetensors are needed (those of the model that it was converted "
    f"from, such as org/name on the Hugging Face hub); {SERVED} (`hearth models --supported`)"
)


def check_folder(model_dir: Path, *, needs_weights: bool) -> None:
    """Checks what the folder holds by the names of its files. Raises CheckpointError, which names
    the case and what to do.
    """
    if model_dir.suffix == GGUF and not model_dir.is_dir():
        raise CheckpointError(f"{model_dir}: {NO_GGUF}")
    if not model_dir.is_dir():
        found = "is a file" if model_dir.exists() else "does not exist"
        raise CheckpointError(f"{model_dir} {found}: {EXPECTED}")
    names = {each.name for each in model_dir.iterdir()}
    reason = _reason(model_dir, names, needs_weights=needs_weights)
    if reason:
        raise CheckpointError(f"{model_dir} {reason}")


def check_tokenizer(model_dir: Path) -> None:
    """Raises CheckpointError for a folder without a tokenizer that Hearth reads."""
    if exists(model_dir / RANKS_FILE) or exists(tokenizer_file(model_dir)):
        return
    raise CheckpointError(
        f"{model_dir} has no {TOKENIZER_FILE}: copy it from the model that it was made from"
    )


def _reason(model_dir: Path, names: set[str], *, needs_weights: bool) -> str:
    """Returns why the files are no checkpoint, or ""."""
    suffixes = {Path(name).suffix for name in names if not name.startswith("adapter_")}
    if not names:
        return f"is empty: {EXPECTED}"
    if WEIGHTS not in suffixes and ADAPTER in names:
        return (
            f"is a LoRA adapter{_base_of(model_dir)}, which is not served: merge it into its model "
            "(peft: merge_and_unload, then save_pretrained)"
        )
    if WEIGHTS not in suffixes and GGUF in suffixes:
        return f"has *.gguf alone: {NO_GGUF}"
    if "config.json" not in names:
        return f"has no config.json: {EXPECTED}"
    if WEIGHTS in suffixes or not needs_weights:
        return ""
    pickle = min((name for name in names if name.endswith(PICKLES)), default=None)
    if pickle is None:
        return f"has no *{WEIGHTS}: its weights are missing"
    return (
        f"has weights in {pickle} alone, a format that may run code, and is not served: write "
        f"safetensors with transformers (from_pretrained, then save_pretrained)"
    )


def _base_of(model_dir: Path) -> str:
    try:
        base = json.loads(read_checkpoint_file(model_dir / ADAPTER))["base_model_name_or_path"]
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return ""
    return f" of {base[:100]}" if isinstance(base, str) and base.isprintable() else ""
