"""The table of families and features in the README of models, from the tests' small models.

    python -m tests.support.engine.family_table --write

A mark: the logits of a model with this feature are compared with those of transformers.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

from benchmarks.readme_table import replaced
from shared.engine.model_config.model_config import ModelConfig
from shared.engine.models.checkpoint_config import read_config
from shared.kv_layout import Chunk, Window
from tests.support.engine.families import FAMILIES

README = Path(__file__).parents[3] / "shared/engine/models/README.md"
MARKER = "families (tests/support/engine/family_table.py)"


def _some(config: ModelConfig, kind: type) -> bool:
    return any(isinstance(layer.reach, kind) for layer in config.layers)


FEATURES: dict[str, Callable[[ModelConfig], bool]] = {
    "experts": lambda config: config.has_experts,
    "latents": lambda config: config.latent is not None,
    "windows": lambda config: _some(config, Window),
    "chunks": lambda config: _some(config, Chunk),
    "no rope": lambda config: any(layer.rope_index is None for layer in config.layers),
    "scaled rope": lambda config: any(rope.scaling is not None for rope in config.ropes),
    "head norms": lambda config: (
        config.has_qk_norm or any(layer.has_weightless_qk_norm for layer in config.layers)
    ),
    "biases": lambda config: config.has_qkv_bias or config.has_mlp_bias,
    "softcaps": lambda config: config.attention_softcap is not None,
    "sinks": lambda config: config.has_sinks,
    "images": lambda config: config.vision is not None,
    "tied": lambda config: config.has_tied_embeddings,
}


def family_table(configs: Iterable[ModelConfig]) -> str:
    """Returns a Markdown table of the features of small models, with a row for each
    architecture.
    """
    found: dict[str, set[str]] = {}
    for config in configs:
        own = found.setdefault(config.architecture, set())
        own |= {name for name, has in FEATURES.items() if has(config)}
    rows = [["architecture", *FEATURES], ["---"] * (1 + len(FEATURES))]
    for architecture in sorted(found):
        marks = ["x" if name in found[architecture] else "" for name in FEATURES]
        rows.append([f"`{architecture}`", *marks])
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def written(configs: Iterable[ModelConfig]) -> str:
    return replaced(README.read_text(), MARKER, family_table(configs))


def _main() -> None:
    configs = []
    for family in FAMILIES.values():
        with tempfile.TemporaryDirectory() as folder:
            family.write(Path(folder))
            configs.append(read_config(Path(folder)))
    text = written(configs)
    if "--write" in sys.argv:
        README.write_text(text)
    else:
        sys.stdout.write(text)


if __name__ == "__main__":
    _main()
