"""The names and shapes of an image encoder's tensors, as its modules would name them. No torch."""

from __future__ import annotations

from math import prod

from shared.engine.model_config.vision_config import (
    Llama4VisionConfig,
    MoonVitConfig,
    SiglipConfig,
    VisionConfig,
)

Shapes = dict[str, tuple[int, ...]]


def vision_tensors(config: VisionConfig) -> Shapes:
    match config:
        case SiglipConfig():
            return _siglip(config)
        case Llama4VisionConfig():
            return _llama4(config)
        case MoonVitConfig():
            return _moonvit(config)


def _siglip(config: SiglipConfig) -> Shapes:
    hidden, inner, patch = config.hidden_size, config.intermediate_size, config.patch_size
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
        path = f"vision_model.encoder.layers.{index}"
        found |= _pair(f"{path}.layer_norm1", hidden) | _pair(f"{path}.layer_norm2", hidden)
        found |= _split_layer(path, "out_proj", hidden, inner)
    return found


def encoder_bytes(config: VisionConfig | None, item_bytes: int) -> int:
    """Returns the bytes of the weights of an encoder; 0 for a model without one."""
    shapes = {} if config is None else vision_tensors(config)
    return item_bytes * sum(map(prod, shapes.values()))


def _llama4(config: Llama4VisionConfig) -> Shapes:
    hidden, patch = config.hidden_size, config.patch_size
    adapter, output = config.adapter_size, config.adapter_output_size
    found: Shapes = {
        "vision_model.patch_embedding.linear.weight": (hidden, 3 * patch * patch),
        "vision_model.class_embedding": (hidden,),
        "vision_model.positional_embedding_vlm": (config.patches_per_side**2 + 1, hidden),
        "vision_model.vision_adapter.mlp.fc1.weight": (adapter, hidden * config.scale_factor**2),
        "vision_model.vision_adapter.mlp.fc2.weight": (output, adapter),
        "multi_modal_projector.linear_1.weight": (config.output_size, output),
        **_pair("vision_model.layernorm_pre", hidden),
        **_pair("vision_model.layernorm_post", hidden),
    }
    for index in range(config.num_layers):
        path = f"vision_model.model.layers.{index}"
        found |= _pair(f"{path}.input_layernorm", hidden)
        found |= _pair(f"{path}.post_attention_layernorm", hidden)
        found |= _split_layer(path, "o_proj", hidden, config.intermediate_size)
    return found


def _moonvit(config: MoonVitConfig) -> Shapes:
    hidden, inner, patch = config.hidden_size, config.intermediate_size, config.patch_size
    merged = hidden * config.merge_size**2
    positions = (config.position_rows, config.position_columns, hidden)
    found: Shapes = {
        "vision_tower.patch_embed.proj.weight": (hidden, 3, patch, patch),
        "vision_tower.patch_embed.proj.bias": (hidden,),
        "vision_tower.patch_embed.pos_emb.weight": positions,
        **_pair("vision_tower.encoder.final_layernorm", hidden),
        **_pair("mm_projector.pre_norm", hidden),
        **_pair("mm_projector.proj.0", merged, merged),
        **_pair("mm_projector.proj.2", config.output_size, merged),
    }
    for index in range(config.num_layers):
        path = f"vision_tower.encoder.blocks.{index}"
        found |= _pair(f"{path}.norm0", hidden) | _pair(f"{path}.norm1", hidden)
        found |= _pair(f"{path}.wqkv", 3 * hidden, hidden) | _pair(f"{path}.wo", hidden, hidden)
        found |= _pair(f"{path}.mlp.fc0", inner, hidden) | _pair(f"{path}.mlp.fc1", hidden, inner)
    return found


def _split_layer(path: str, output: str, hidden: int, inner: int) -> Shapes:
    """A layer's attention, with queries, keys and values apart, and its MLP."""
    found: Shapes = {}
    for name in ("q_proj", "k_proj", "v_proj", output):
        found |= _pair(f"{path}.self_attn.{name}", hidden, hidden)
    found |= _pair(f"{path}.mlp.fc1", inner, hidden)
    return found | _pair(f"{path}.mlp.fc2", hidden, inner)


def _pair(path: str, rows: int, *columns: int) -> Shapes:
    """Returns a weight [rows, columns] and its bias."""
    return {f"{path}.weight": (rows, *columns), f"{path}.bias": (rows,)}
