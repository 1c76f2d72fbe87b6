"""How a checkpoint's tensors differ from the model's: names, parts left out, order of rows."""

from __future__ import annotations

import msgspec


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
    """

    num_experts: int
    inner: int


class CheckpointForm(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Patterns are regular expressions.

    `renames`: pattern in a checkpoint's name -> its replacement, one after the other.
    `dropped`: tensors that the model does not use, by the start of the checkpoint's name.
    `paired`: by the model's full name. `experts`: those of all layers, None: one tensor of each.
    """

    renames: tuple[tuple[str, str], ...] = ()
    dropped: tuple[str, ...] = ()
    paired: tuple[tuple[str, PairedRows], ...] = ()
    experts: StackedExperts | None = None


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
