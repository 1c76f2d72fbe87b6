"""The names and shapes of an image encoder's tensors, as its modules would name them. No torch."""

from __future__ import annotations

from shared.engine.model_config.vision_config import VisionConfig

Shapes = dict[str, tuple[int, ...]]


def vision_tensors(config: VisionConfig) -> Shapes:
    hidden, patch = config.hidden_size, config.patch_size
    found: Shapes = {
        "vision_model.embeddings.patch_embedding.weight": (hidden, 3, patch, patch),
        "vision_model.embeddings.patch_embedding.bias": (hidden,),
        "vision_model.embeddings.position_embedding.weight": (config.patches_per_side**2, hidden),
        "connector.modality_projection.proj.weight": (
            config.output_size,
            hidden * config.scale_factor**2,
        ),
        **_pair("vision_model.post_layernorm", hidden),
    }
    for index in range(config.num_layers):
        found |= _layer(f"vision_model.encoder.layers.{index}", hidden, config.intermediate_size)
    return found


def _layer(path: str, hidden: int, inner: int) -> Shapes:
    found: Shapes = {}
    for name in ("layer_norm1", "layer_norm2"):
        found |= _pair(f"{path}.{name}", hidden)
    for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
        found |= _pair(f"{path}.self_attn.{name}", hidden, hidden)
    found |= _pair(f"{path}.mlp.fc1", inner, hidden)
    return found | _pair(f"{path}.mlp.fc2", hidden, inner)


def _pair(path: str, rows: int, *columns: int) -> Shapes:
    """Returns a weight [rows, columns] and its bias."""
    return {f"{path}.weight": (rows, *columns), f"{path}.bias": (rows,)}
