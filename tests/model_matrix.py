"""The tables of services/guides/models.md, made from the code that reads checkpoints.

python -m tests.model_matrix            print the page with current tables
python -m tests.model_matrix --write    put them into it
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.readme_table import replaced
from services.cli.checkpoints import support_table
from services.gateway.structured.tools import family_choice
from services.gateway.structured.tools.families import FAMILIES as TOOL_FAMILIES
from shared.engine.model_config.quantization_config import checkpoint_formats
from shared.engine.models import BY_MODEL_TYPE, FAMILIES, Configure
from shared.engine.models.rope_config import ROPE_TYPES
from shared.engine.models.vision import kimi, llama4, smolvlm
from shared.errors import CheckpointError

PAGE = Path(__file__).resolve().parents[1] / "services/guides/models.md"
PROOF = "tests/shared/engine/models/test_supported_weights.py::test_weights_are_read"
REFERENCE = PAGE.parents[1] / "README.md"
MODELS = {
    "LlamaForCausalLM": "Llama 2, 3, 3.1 to 3.3, DeepSeek-R1-Distill-Llama",
    "Llama4ForCausalLM": "Llama 4, text checkpoints",
    "Llama4ForConditionalGeneration": "Llama 4 Scout and Maverick",
    "MistralForCausalLM": "Mistral 7B, Nemo, Small 3",
    "Qwen2ForCausalLM": "Qwen 2, 2.5, QwQ",
    "Qwen3ForCausalLM": "Qwen 3, Qwen3-Embedding, Qwen3-Reranker",
    "Gemma2ForCausalLM": "Gemma 2",
    "Gemma3ForCausalLM": "Gemma 3 270M, 1B",
    "Gemma3ForConditionalGeneration": "Gemma 3 4B and larger",
    "Phi3ForCausalLM": "Phi-3, Phi-3.5 mini, Phi-4",
    "DeepseekV3ForCausalLM": "DeepSeek V3, V3.1, R1; Kimi K2",
    "KimiK25ForConditionalGeneration": "Kimi K2.5",
    "Kimi_K25ForConditionalGeneration": "Kimi K2.5, by its other name",
    "SmolVLMForConditionalGeneration": "SmolVLM, SmolVLM2",
    "Idefics3ForConditionalGeneration": "Idefics3 8B",
    "MixtralForCausalLM": "Mixtral 8x7B, 8x22B",
    "Qwen3MoeForCausalLM": "Qwen3 30B-A3B, 235B-A22B",
    "Glm4MoeForCausalLM": "GLM-4.5, 4.6",
    "GptOssForCausalLM": "gpt-oss 20b, 120b",
}
_PACKED = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "strategy": "group", "group_size": 128},
        }
    },
}
_FP8_KV = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
_INT8 = {
    **_PACKED,
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 8}}},
}
_FP8_ROWS = {
    **_PACKED,
    "format": "float-quantized",
    "config_groups": {
        "group_0": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float"}}
    },
}
FORMATS: dict[str, dict[str, Any] | None] = {
    "BF16, FP16, FP32": None,
    "INT4 of compressed-tensors (`pack-quantized`)": _PACKED,
    "FP8 in blocks of 128 x 128 (DeepSeek, compressed-tensors)": {
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
    "an FP8 KV cache (`kv_cache_scheme`)": {
        "quant_method": "compressed-tensors",
        "config_groups": {},
        "kv_cache_scheme": _FP8_KV,
    },
    "FP8 with a scale per tensor (`fp8`)": {"quant_method": "fp8"},
    "FP8 per channel (`float-quantized`, `fbgemm_fp8`)": _FP8_ROWS,
    "INT8 of compressed-tensors (`pack-quantized`)": _INT8,
    "INT8 of compressed-tensors (`int-quantized`)": {**_INT8, "format": "int-quantized"},
    "AWQ (gemm)": {"quant_method": "awq", "bits": 4},
    "AWQ (gemv)": {"quant_method": "awq", "bits": 4, "version": "gemv"},
    "GPTQ, 4 and 8 bits, versions 1 and 2": {"quant_method": "gptq", "bits": 4},
    "GPTQ, other bits": {"quant_method": "gptq", "bits": 3},
    "bitsandbytes": {"quant_method": "bitsandbytes", "load_in_4bit": True},
    "MXFP4 (gpt-oss)": {"quant_method": "mxfp4"},
    "NVFP4 of ModelOpt": {"quant_method": "modelopt", "quant_algo": "NVFP4"},
}


def architectures() -> str:
    """Returns a table. Raises KeyError for an architecture without a name of models."""
    types: dict[str, list[str]] = {}
    for model_type, architecture in BY_MODEL_TYPE.items():
        types.setdefault(architecture, []).append(f"`{model_type}`")
    rows = []
    for architecture, configure in FAMILIES.items():
        named = ", ".join(types.get(architecture, []))
        rows.append((f"`{architecture}`", named, MODELS[architecture], _parts(configure)))
    return _table(("architecture", "`model_type`", "such as", "served"), rows)


def _parts(configure: Configure) -> str:
    if configure in (smolvlm.configure, kimi.configure):
        return "text and images; no video"
    if configure is llama4.configure:
        return "text and images"
    is_text_part = configure.__name__ == "configure_text_part"
    return "text part; images are refused" if is_text_part else "all"


def supported() -> str:
    """Returns a table. A cell names the test of its architecture and format."""
    alike: dict[tuple[str, ...], list[str]] = {}
    for architecture, *cells in support_table.support_rows():
        alike.setdefault(tuple(cells), []).append(f"`{architecture}`")
    rows = [(", ".join(names), *cells) for cells, names in alike.items()]
    table = _table(("architecture", *support_table.FORMATS), rows)
    return f"{table}\nThe test of a cell: `{PROOF}[ARCHITECTURE-FORMAT]`.\n"


def formats() -> str:
    rows = [(name, *_judged(config)) for name, config in FORMATS.items()]
    return _table(("weights", "served", "else the message says"), rows)


def _judged(config: dict[str, Any] | None) -> tuple[str, str]:
    given = {} if config is None else {"quantization_config": config}
    try:
        checkpoint_formats(given)
    except CheckpointError as error:
        reason = error.message.partition(": ")[2].partition(";")[0]
        return "no", f"`{reason}`"
    return "yes", ""


def tools() -> str:
    """Returns a table in the order in which formats are tried."""
    rows = [
        (_code(family.name), " and ".join(map(_code, markers)))
        for family, markers in family_choice._MARKERS
    ]
    chosen = {family.name for family, _ in family_choice._MARKERS}
    called = {name for name, each in TOOL_FAMILIES.items() if each.call_format is not None}
    rows += [(_code(name), "`--response-template` alone") for name in sorted(called - chosen)]
    return _table(("format of calls", "the chat template has"), rows)


def _code(text: str) -> str:
    """Returns code for a cell of a table, where a bar has to be escaped."""
    quote = "`` " if "`" in text else "`"
    return f"{quote}{text.replace('|', chr(92) + '|')}{quote[::-1]}"


def ropes() -> str:
    return f"Scaled positions: {', '.join(f'`{each}`' for each in ROPE_TYPES)}.\n"


def written() -> str:
    """Returns the page with current tables."""
    text = PAGE.read_text()
    parts = {
        "architectures": architectures,
        "formats": formats,
        "tools": tools,
        "ropes": ropes,
    }
    for name, made in parts.items():
        text = replaced(text, f"{name} (tests/model_matrix.py)", made())
    return text


def written_reference() -> str:
    """Returns the reference of services with the current table."""
    return replaced(REFERENCE.read_text(), "supported (tests/model_matrix.py)", supported())


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "".join(f"| {' | '.join(each)} |\n" for each in lines)


def main() -> None:
    if "--write" in sys.argv:
        PAGE.write_text(written())
        REFERENCE.write_text(written_reference())
    else:
        print(written())


if __name__ == "__main__":
    main()
