"""The work of the steps of a model in this process, with its weights as they are stored."""

from __future__ import annotations

from shared.engine.model_config.model_config import ModelConfig
from shared.engine.parallel.rank_part import whole_model
from shared.engine.planning.rank_bytes import weight_bytes
from shared.engine.planning.step_work import ModelWorkload, model_work
from shared.engine.weights.weight_form import WeightsReport
from shared.kv_layout import ITEM_BYTES


def local_work(
    config: ModelConfig, stored: WeightsReport, *, item_bytes: int, kv_dtype: str
) -> ModelWorkload:
    """Returns the work of a loaded model. What lossless compression saves counts alike for all
    weights.
    """
    saved = stored.num_compressed * item_bytes - stored.num_compressed_bytes
    dense = weight_bytes(config, whole_model(config), item_bytes)
    return model_work(
        config,
        item_bytes=item_bytes,
        kv_item_bytes=ITEM_BYTES[kv_dtype],
        stored_share=1.0 - saved / dense,
    )
