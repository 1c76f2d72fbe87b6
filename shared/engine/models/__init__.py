"""The model families, by the name in a checkpoint's `architectures`.

The classes are imported when asked for, so that the package itself stays free of torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shared.errors import CheckpointError

if TYPE_CHECKING:
    from shared.engine.models.llama import LlamaForCausalLM

ARCHITECTURES = ("LlamaForCausalLM",)


def model_class(architecture: str) -> type[LlamaForCausalLM]:
    """Raises CheckpointError for an architecture that is not supported."""
    if architecture != "LlamaForCausalLM":
        raise CheckpointError(
            f"architecture {architecture!r} is not supported, only {', '.join(ARCHITECTURES)}"
        )
    from shared.engine.models.llama import LlamaForCausalLM

    return LlamaForCausalLM
