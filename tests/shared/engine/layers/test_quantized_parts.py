"""Every stored format is transcoded without a loss, in about the bytes of the file."""

from __future__ import annotations

import pytest
import torch
from msgspec.structs import replace

from shared.engine.layers.quantized_store import QuantizedStore, quantized_store
from shared.engine.model_config.formats import Fp8Block, Fp8Rows, WeightFormat
from shared.engine.model_config.quantization_config import checkpoint_formats
from shared.errors import CheckpointError
from tests.support.engine.stored_formats import FORMATS, StoredFormat, Tensors, gptq
from tests.support.grids import in_one_test

NAMES = {torch.float16: "F16", torch.bfloat16: "BF16", torch.float32: "F32"}
BF16 = torch.bfloat16


def format_of(stored: StoredFormat, tensors: Tensors) -> WeightFormat:
    """As the config and the scales describe it."""
    given = {"quantization_config": stored.config, "dtype": "bfloat16"}
    found = checkpoint_formats(given).weights
    assert found is not None
    form = found.format_of("model.layers.0.mlp.up_proj")
    assert form is not None
    kind = next(each for each in tensors if each == "scales" or each.startswith("weight_scale"))
    if isinstance(form, Fp8Block):  # scales of BF16 are read as FP32
        return form
    if isinstance(form, Fp8Rows):
        form = replace(form, scale=kind)
    return replace(form, scale_dtype=NAMES[tensors[kind].dtype])


def filled(store: QuantizedStore, layers: list[Tensors]) -> torch.Tensor:
    memory = torch.zeros(store.num_bytes, dtype=torch.uint8)
    for part, tensors in zip(store.parts(memory), layers, strict=True):
        for kind, destination in part.items():
            destination.copy_(tensors[kind].reshape(destination.shape))
    return memory


@in_one_test("name", FORMATS)
def test_decoded_weights_have_the_bits_of_the_reference(name: str) -> None:
    stored = FORMATS[name]
    for shape in ((96, 128), (40, 64), (8, 192)):
        weights = [torch.randn(shape) for _ in range(2)]
        layers = [stored.store(each) for each in weights]
        store = quantized_store(format_of(stored, layers[0]), [shape[0]] * 2, shape[1], BF16)
        found = store.transcoded(filled(store, layers)).dense()
        expected = [stored.dense(each, torch.Size(shape), BF16) for each in layers]
        assert torch.equal(found, torch.cat(expected))
        assert (found.float() - torch.cat(weights)).abs().max() < 0.5


@in_one_test("name", FORMATS)
def test_weights_take_the_bytes_of_the_file(name: str) -> None:
    stored = FORMATS[name]
    tensors = stored.store(torch.randn(256, 1024))
    store = quantized_store(format_of(stored, tensors), [256], 1024, BF16)
    found = store.transcoded(filled(store, [tensors]))
    assert found.num_bytes <= 1.03 * store.num_bytes


def test_zeros_of_0_are_stored_with_a_borrow_in_version_1_of_gptq() -> None:
    weight = torch.rand(16, 64) + 0.1  # no negative number: all zeros are 0
    stored = gptq(32, is_symmetric=False)
    tensors = stored.store(weight)
    assert tensors["qzeros"].unique().tolist() == [-0x11111111]
    store = quantized_store(format_of(stored, tensors), [16], 64, BF16)
    found = store.transcoded(filled(store, [tensors])).dense()
    assert (found.float() - weight).abs().max() < 0.05


def test_orders_of_columns_may_differ_between_blocks_of_rows_alone() -> None:
    """As they do between experts; parts of fewer than 32 rows share one."""
    stored = gptq(32, is_ordered=True)
    for num_rows in (32, 40):
        layers = [stored.store(torch.randn(num_rows, 64)) for _ in range(2)]
        expected = [stored.dense(each, torch.Size((num_rows, 64)), BF16) for each in layers]
        other = layers[1]["g_idx"].flip(0)
        layers[1]["g_idx"] = other
        expected[1] = stored.dense(layers[1], torch.Size((num_rows, 64)), BF16)
        form = format_of(stored, layers[0])
        store = quantized_store(form, [num_rows] * 2, 64, BF16)
        memory = filled(store, layers)
        if num_rows == 32:
            assert torch.equal(store.transcoded(memory).dense(), torch.cat(expected))
            continue
        padded = store.transcoded(memory, is_padded=True).dense()
        assert torch.equal(padded.view(2, 64, 64)[:, :40].flatten(0, 1), torch.cat(expected))
        with pytest.raises(CheckpointError, match="have different orders of columns"):
            store.transcoded(memory)


def test_words_that_rows_do_not_fill_are_named() -> None:
    form = format_of(FORMATS["awq"], FORMATS["awq"].store(torch.randn(32, 64)))
    with pytest.raises(CheckpointError, match="12 rows and 64 columns does not fill words of 8"):
        quantized_store(form, [12], 64, BF16)
    with pytest.raises(CheckpointError, match="48 columns are no multiple of group_size 32"):
        quantized_store(form, [32], 48, BF16)
