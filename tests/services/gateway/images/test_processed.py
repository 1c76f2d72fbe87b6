"""An image of any grid is hashed, and sent in the order of its pixels."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path

import pytest

from services.gateway.images.config import read_image_config
from services.gateway.images.families.llama4_config import Llama4Config
from services.gateway.images.input_image import ImageContext, InputImage
from services.gateway.images.processed import processed
from services.gateway.images.processors import processor_of
from tests.services.gateway.images.test_processor import drawn
from tests.support.services.vision_dir import write_vision_dir

LLAMA4 = Llama4Config(tile_size=24, tokens_per_tile=9, image_token_id=0, digest=b"", max_tiles=16)


@pytest.mark.parametrize("family", ["smolvlm", "llama4"])
def test_rows_columns_and_grids_of_tiles_are_sent_in_order(family: str, tmp_path: Path) -> None:
    """Of one row or column numpy makes no copy, and keeps the order of the image's file."""
    config = LLAMA4 if family == "llama4" else read_image_config(write_vision_dir(tmp_path / "m"))
    assert config is not None
    processor = processor_of(config)
    context, rows_and_columns = ImageContext(max_pixels=1 << 20), set[tuple[bool, bool]]()
    for size in [(3, 900), (200, 40), (48, 24), (90, 70), (24, 24)]:
        image, file = drawn(*size), BytesIO()
        image.save(file, "PNG")
        given = InputImage("messages[0]", file.getvalue(), is_decoded=True)
        (found,) = processed([given], config, processor, context, lambda _: None)
        assert found.pixels == processor.pixels_of(image).tobytes(), size
        rows, columns = found.grid
        rows_and_columns.add((rows > 1, columns > 1))
    assert rows_and_columns >= {(False, True), (True, False), (True, True)}
