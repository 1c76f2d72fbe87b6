"""The image processor of a model, by its family."""

from __future__ import annotations

from services.gateway.images.config import ImageConfig
from services.gateway.images.families.idefics3 import Idefics3Processor
from services.gateway.images.families.idefics3_config import Idefics3Config
from services.gateway.images.families.kimi import KimiProcessor
from services.gateway.images.families.kimi_config import KimiConfig
from services.gateway.images.families.llama4 import Llama4Processor
from services.gateway.images.families.llama4_config import Llama4Config
from services.gateway.images.families.processor import Processor


def processor_of(config: ImageConfig) -> Processor:
    match config:
        case Idefics3Config():
            return Idefics3Processor(config)
        case Llama4Config():
            return Llama4Processor(config)
        case KimiConfig():
            return KimiProcessor(config)
