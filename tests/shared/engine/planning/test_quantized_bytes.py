"""The planned bytes of quantized weights are those of the model that the config describes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from msgspec.structs import replace

from shared.engine.model_config.formats import (
    Fp8Block,
    Fp8Rows,
    Gptq,
    Int4,
    Int8,
    WeightFormat,
)
from shared.engine.model_config.quantization import ConfigGroup, Quantization
from shared.engine.models.checkpoint_config import with_formats
from shared.engine.models.decoder import Decoder
from shared.engine.parallel.rank_part import whole_model
from shared.engine.planning.quantized_bytes import saved_bytes
from shared.engine.planning.rank_bytes import num_weights
from tests.shared.engine.planning.test_rank_bytes import LATENTS, MOE, PLAIN

_LAST = PLAIN.layers[3:]
CHANGES: dict[str, dict[str, Any]] = {
    "plain": {},
    "latents": LATENTS,
    "experts": {
        "layers": (*PLAIN.layers[:3], *(replace(each, moe=MOE) for each in PLAIN.layers[3:]))
    },
}
FORMS: list[WeightFormat] = [
    Int4(group=8, is_symmetric=True),
    Fp8Block(),
    Fp8Rows(is_per_tensor=True),
    Int8(group=0, is_symmetric=False),
    Gptq(num_bits=8, group=8, is_symmetric=False, is_offset=True, is_ordered=True),
]


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_bytes_are_those_of_the_tensors(name: str, form: WeightFormat) -> None:
    groups = (ConfigGroup(targets=("Linear",), form=form),)
    # What expands latents is dequantized as it is loaded; sizes of experts are padded.
    quantization = Quantization(groups=groups, ignored=("re:.*kv_b_proj", r"re:.*experts\..*"))
    dense = replace(PLAIN, **CHANGES[name])
    config = with_formats(dense, quantization)
    saved = []
    for each in (dense, config):
        with torch.device("meta"):
            model = Decoder(each, dtype=torch.bfloat16, num_positions=1)
        saved.append(sum(p.numel() * p.element_size() for p in model.parameters()))
    assert saved_bytes(config, whole_model(config), 2) == saved[0] - saved[1]
    assert saved_bytes(dense, whole_model(dense), 2) == 0
    assert num_weights(config, whole_model(config)) == num_weights(dense, whole_model(dense))
