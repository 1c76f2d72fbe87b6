"""Describes how a checkpoint's tensors differ from the model's: names, parts left out, order of
rows.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from math import prod

import msgspec

# Buffers that old exporters saved, although the config determines them, and the copy of a tied
# model's embedding.
_HARMLESS_SUFFIXES = ("rotary_emb.inv_freq", "lm_head.weight")
# A layer's scale of KV, by the model's name: the layer, then what it scales.
KV_SCALE = re.compile(
    r"model\.layers\.(\d+)\.self_attn\."
    r"(?:(?:attn\.|[kv]_proj\.|qkv_proj\.)?(k|v|kv)_scale|([kv])_proj\.output_scale)"
)
# The tensors that quantization puts beside or in place of a layer's weight.
_QUANTIZED_KINDS = ("weight_", "qweight", "qzeros", "scales", "g_idx", "absmax", "quant_")
# Tensors with words of several rows, which cannot follow another order of rows -> what they are.
FIXED_KINDS = {
    "weight_zero_point": "zero points",
    **dict.fromkeys(("qweight", "qzeros", "scales"), "AWQ and GPTQ"),
}
_GATE_UP, _DOWN = ".experts.gate_up_proj", ".experts.down_proj"
# Ends of names of stacked tensors of rows -> those of one expert's.
_OF_ROWS = {"_bias": "bias", "_blocks": "weight_blocks", "_scales": "weight_scales"}


class PairedRows(msgspec.Struct, frozen=True, kw_only=True):
    """Rows of a weight whose rotary pairs are neighbours: (0, 1), (2, 3) and so on.

    Each `head` rows have `dim` such rows from `first` on. The model has the pairs as two halves:
    rows 0, 2, 4 and so on come first. Scores of attention do not depend on the order.
    """

    head: int
    first: int
    dim: int


class StackedExperts(msgspec.Struct, frozen=True, kw_only=True):
    """Experts whose weights a checkpoint has as one tensor, as factors on the right of x.

    The model's names end with `experts.gate_up_proj` [num_experts, hidden, 2 · inner], gate first,
    and `experts.down_proj` [num_experts, inner, hidden]. The model has a weight [N, K] of each.
    If it `is_interleaved`, columns of gate and up alternate. Biases have the same names and
    `_bias`: [num_experts, 2 · inner] and [num_experts, hidden]. In MXFP4 the names end with
    `_blocks` and `_scales`, and rows come first: [num_experts, 2 · inner, ...].
    """

    num_experts: int
    inner: int
    is_interleaved: bool = False


class CheckpointForm(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The names and form of a checkpoint's tensors. Patterns are regular expressions.

    `renames` maps a pattern in a checkpoint's name to its replacement; they apply one after the
    other. `dropped` are tensors that the model does not use, by the start of the checkpoint's name.
    `paired` has paired rows by the model's full name. `experts` describes stacked experts, or is
    None if each expert has a tensor.
    """

    renames: tuple[tuple[str, str], ...] = ()
    dropped: tuple[str, ...] = ()
    paired: tuple[tuple[str, PairedRows], ...] = ()
    experts: StackedExperts | None = None

    @property
    def has_mxfp4(self) -> bool:
        """Whether experts may be in MXFP4, which transformers defines for the form of gpt-oss."""
        return self.experts is not None and self.experts.is_interleaved


# A language model beside an image encoder: the prefixes that transformers writes, and the
# parameter names of its models.
TEXT_PART = CheckpointForm(
    renames=(
        (r"^language_model\.model\.", "model."),
        (r"^language_model\.lm_head\.", "lm_head."),
        (r"^model\.language_model\.", "model."),
    ),
    dropped=(r"(model\.)?(vision_tower|multi_modal_projector)\.",),
)

# The same for SmolVLM and Idefics 3.
_IDEFICS_VISION = r"(model\.)?(vision_model|connector)\."
TEXT_OF_IDEFICS = CheckpointForm(
    renames=((r"^model\.text_model\.", "model."), (r"^text_model\.", "model.")),
    dropped=(_IDEFICS_VISION,),
)


def _encoder_alone(*parts: str) -> CheckpointForm:
    """The tensors of an image encoder and its projector alone."""
    own = rf"(model\.)?({'|'.join(parts)})\."
    return CheckpointForm(renames=((r"^model\.", ""),), dropped=(rf"(?!{own})",))


VISION_OF_IDEFICS = _encoder_alone("vision_model", "connector")
VISION_OF_LLAMA4 = _encoder_alone("vision_model", "multi_modal_projector")
VISION_OF_KIMI = _encoder_alone("vision_tower", "mm_projector")


# A base model has the tensors of the decoder by their names in it, whatever its family.
_BASE_MODEL = re.compile(r"^(?:language_model\.)?(?=(?:embed_tokens|layers\.\d+|norm)\.)")


def model_names(names: Iterable[str], form: CheckpointForm) -> list[tuple[str, str]]:
    """Returns the checkpoint's name and the model's name of each tensor that is not dropped."""
    dropped = [re.compile(pattern) for pattern in form.dropped]
    renames = [(re.compile(pattern), new) for pattern, new in form.renames]
    found = []
    for given in names:
        if any(pattern.match(given) for pattern in dropped):
            continue
        name = given
        for pattern, new in renames:
            name = pattern.sub(new, name)
        name = _BASE_MODEL.sub("model.", name)
        found.append((given, name))
    return found


def own_names(layer: str, renames: Sequence[tuple[str, str]]) -> tuple[str, ...]:
    """Returns the names that a checkpoint and transformers may have for a layer of the model.

    `renames` are inverted: each is literal text, but for a `^` or a group before it. Any prefix may
    stand before the language model's names: releases of transformers differ, and a config keeps the
    names of the release that wrote it.
    """
    name, prefixes = f"{layer}.", ["", "model.", "language_model.model.", "language_model."]
    for pattern, replacement in renames:
        own, new = pattern.rpartition(")")[2].replace("\\", ""), replacement.removeprefix(r"\1")
        if not own.startswith("^"):
            name = name.replace(new, own, 1)
        elif new == "model.":
            prefixes.append(own.removeprefix("^"))
    name = name.removesuffix(".")
    inside = name.removeprefix("model.")
    if not inside.startswith("layers."):
        return name, f"language_model.{name}"
    prefixes.append("model.language_model.")
    return tuple(dict.fromkeys(f"{prefix}{inside}" for prefix in prefixes))


def is_harmless(name: str) -> bool:
    """Whether no model needs the tensor; scales of KV only with a cache in FP8."""
    return name.endswith(_HARMLESS_SUFFIXES) or KV_SCALE.fullmatch(name) is not None


def is_quantized_part(name: str, expected: Container[str]) -> bool:
    """Whether a tensor that the model does not have belongs to a dense layer of it."""
    layer, _, kind = name.rpartition(".")
    return kind.startswith(_QUANTIZED_KINDS) and f"{layer}.weight" in expected


@dataclass(frozen=True, slots=True)
class StackedPart:
    """Columns [first, end) of expert `index` of a tensor [E, K, N], transposed, or rows of a tensor
    [E, N, ...] that `has_rows`. Only each `step`-th of them.
    """

    index: int
    first: int
    end: int | None  # None: all from `first` on
    has_rows: bool = False
    step: int = 1

    def shape(self, full: Sequence[int]) -> tuple[int, ...]:
        """[N, K], or [N] or [N, all else] of rows; the full shape if it does not have this part."""
        if len(full) < 2 or (len(full) != 3 and not self.has_rows) or self.index >= full[0]:
            return tuple(full)
        size = full[1] if self.has_rows else full[2]
        if self.end is not None and self.end > size:
            return tuple(full)
        num_rows = len(range(self.first, size if self.end is None else self.end, self.step))
        if not self.has_rows:
            return num_rows, full[1]
        return (num_rows, prod(full[2:])) if len(full) > 2 else (num_rows,)


def stacked_parts(name: str, experts: StackedExperts | None) -> dict[str, StackedPart]:
    """Returns the weights that a tensor consists of, by the model's names; none if
    it is one itself.
    """
    ending = next((each for each in _OF_ROWS if name.endswith(each)), "")
    stem = name.removesuffix(ending)
    if experts is None or not stem.endswith((_GATE_UP, _DOWN)):
        return {}
    layer, inner = stem.rpartition(".")[0], experts.inner
    places: dict[str, tuple[int, int | None, int]]
    if stem.endswith(_DOWN):
        places = {"down_proj": (0, None, 1)}
    elif experts.is_interleaved:
        places = {"gate_proj": (0, 2 * inner, 2), "up_proj": (1, 2 * inner, 2)}
    else:
        places = {"gate_proj": (0, inner, 1), "up_proj": (inner, 2 * inner, 1)}
    kind = _OF_ROWS.get(ending, "weight")
    return {
        f"{layer}.{index}.{part}.{kind}": StackedPart(index, first, end, bool(ending), step)
        for index in range(experts.num_experts)
        for part, (first, end, step) in places.items()
    }
