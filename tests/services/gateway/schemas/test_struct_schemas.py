"""Schemas of message types with descriptions."""

from __future__ import annotations

import msgspec

from services.gateway.schemas.struct_schemas import described_schemas, field_descriptions


class Leaf(msgspec.Struct, tag_field="type", tag="leaf"):
    color: str = "green"
    """The color of
    the leaf.
    """
    "Not a description: it stands below another."


class Branch(msgspec.Struct, rename="camel"):
    own_leaves: list[Leaf]
    """Its leaves."""
    length: float | None = None


class LongBranch(Branch, kw_only=True):
    length: float | None = None
    """In metres."""
    width: float


def test_description_is_the_text_below_the_field() -> None:
    assert field_descriptions(Leaf) == {"color": "The color of the leaf."}


def test_class_inherits_and_adds_descriptions() -> None:
    assert field_descriptions(Branch) == {"own_leaves": "Its leaves."}
    assert field_descriptions(LongBranch) == {"own_leaves": "Its leaves.", "length": "In metres."}


def test_schemas_of_all_types_are_described() -> None:
    [reference], schemas = described_schemas([LongBranch], "#/{name}")
    assert reference == {"$ref": "#/LongBranch"}
    assert schemas["LongBranch"]["properties"]["ownLeaves"]["description"] == "Its leaves."
    assert [*schemas["LongBranch"]["properties"]] == ["ownLeaves", "width", "length"]
    leaf = schemas["Leaf"]["properties"]
    assert leaf["color"]["description"] == "The color of the leaf."
    assert leaf["type"]["description"]
