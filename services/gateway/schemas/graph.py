"""The alternatives of each schema of a document, and which of them have a finite value.

`$ref`, `allOf`, `anyOf` and `oneOf` are expanded: a node has the product of its schemas'
alternatives. A `$ref` that refers to itself through applicators alone has no alternatives.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set
from typing import Any

from services.gateway.schemas.document import Pointer, SchemaDocument
from services.gateway.schemas.instances import fits, lists_disjoint
from services.gateway.schemas.shapes import (
    Kind,
    Node,
    Shape,
    items,
    kind_of,
    members,
    shape_of,
)
from shared.errors import GrammarTooComplex, InvalidRequest

MAX_ALTERNATIVES = 256  # alternatives of one node
MAX_STEPS = 32_768  # steps for one document
ROOT: Node = ("",)
NO_FINITE_VALUE = "the schema cannot be satisfied: no finite value matches it"


class SchemaGraph:
    """The alternatives of the schemas of one document. All methods raise InvalidRequest for a value
    that is no JSON Schema, and GrammarTooComplex beyond MAX_STEPS or MAX_ALTERNATIVES.
    """

    def __init__(self, root: Any) -> None:
        self.document = SchemaDocument(root)
        self._alternatives: dict[Node, list[Shape]] = {}
        self._finite: set[Node] = set()
        self._is_searched: set[Node] = set()
        self._one_ofs: dict[Pointer, list[Pointer]] = {}
        self._num_steps = 0

    def alternatives(self, node: Node) -> list[Shape]:
        """Returns shapes of which each value of the node matches at least one."""
        if node not in self._alternatives:
            shapes = [shape_of(self.document, each) for each in self._leaves_of(node)]
            shapes = [each for each in shapes if each.kinds]
            self._alternatives[node] = shapes
            for each in shapes:
                self._filter(each)
        return self._alternatives[node]

    def kinds(self, node: Node) -> frozenset[Kind]:
        """Returns the kinds of the values that the node allows."""
        found: set[Kind] = set()
        for shape in self.alternatives(node):
            found |= shape.kinds
        return frozenset(found)

    def children(self, shape: Shape) -> Iterator[Node]:
        if "object" in shape.written and shape.literals is None:
            named, _, others = members(self.document, shape)
            yield from named.values()
            if others is not None:
                yield others
        if "array" in shape.written and shape.literals is None:
            heads, rest = items(self.document, shape)
            yield from (*heads, rest)

    def is_finite(self, node: Node) -> bool:
        """Whether a finite value matches the node: the least fixpoint over its references."""
        if node not in self._is_searched:
            self._search(self.reached(node))
        return node in self._finite

    def endless(self, nodes: Iterable[Node]) -> set[Node]:
        """Returns the nodes that only infinite values match: those in the greatest fixpoint and not
        in the least. One search covers all nodes.
        """
        nodes = list(nodes)
        reached = self.reached(*nodes)
        self._search(reached)
        possible = set(reached)
        waiting = possible - self._finite
        while emptied := {each for each in waiting if not self._has_value(each, possible)}:
            possible -= emptied
            waiting -= emptied
        return waiting & set(nodes)

    def reached(self, *nodes: Node) -> list[Node]:
        """Returns the nodes and all nodes that they refer to, directly or not."""
        seen, waiting = dict.fromkeys(nodes), list(nodes)
        while waiting:
            for shape in self.alternatives(waiting.pop()):
                for child in self.children(shape):
                    if child not in seen:
                        seen[child] = None
                        waiting.append(child)
        return list(seen)

    def _search(self, reached: list[Node]) -> None:
        self._is_searched |= set(reached)
        changed = True
        while changed:
            changed = False
            for each in reversed(reached):
                if each not in self._finite and self._has_value(each, self._finite):
                    self._finite.add(each)
                    changed = True

    def unenforced(self) -> list[Pointer]:
        """Returns pointers to the keywords that the alternatives do not enforce, in the order of a
        search.
        """
        found: dict[Pointer, None] = {}
        for node in self.reached(ROOT):
            for shape in self.alternatives(node):
                found |= dict.fromkeys(shape.unenforced)
        for pointer in list(self._one_ofs):
            if not self._is_disjoint(pointer):
                found[f"{pointer}/oneOf"] = None
        return list(found)

    def disjoint_one_ofs(self) -> list[Pointer]:
        """Returns pointers to the schemas of whose `oneOf` no value matches two branches."""
        self.reached(ROOT)
        return [each for each in list(self._one_ofs) if self._is_disjoint(each)]

    def count_step(self) -> None:
        """Counts one step. Raises GrammarTooComplex beyond MAX_STEPS."""
        self._num_steps += 1
        if self._num_steps > MAX_STEPS:
            raise GrammarTooComplex("the schema takes too many steps")

    # ── expansion ────────────────────────────────────────────────────────────────────────────────

    def _leaves_of(self, node: Node) -> list[Node]:
        return self._product(self._leaves(pointer, frozenset()) for pointer in node)

    def _leaves(self, pointer: Pointer, path: frozenset[Pointer]) -> list[Node]:
        self.count_step()
        schema = self.document.schema(pointer)
        if schema is False or pointer in path:
            return []
        if schema is True:
            return [()]
        path = path | {pointer}
        parts: list[list[Node]] = [[(pointer,)]]
        if "$ref" in schema:
            parts.append(self._referred(pointer, schema["$ref"], path))
        for index in range(len(_listed(schema, "allOf", pointer))):
            parts.append(self._leaves(self.document.child(pointer, "allOf", index), path))
        for keyword in ("anyOf", "oneOf"):
            if keyword in schema:
                count = len(_listed(schema, keyword, pointer))
                branches = [self.document.child(pointer, keyword, each) for each in range(count)]
                parts.append([leaf for each in branches for leaf in self._leaves(each, path)])
                if keyword == "oneOf":
                    self._one_ofs[pointer] = branches
        return self._product(parts)

    def _referred(self, pointer: Pointer, reference: Any, path: frozenset[Pointer]) -> list[Node]:
        target = self.document.target(reference)
        if target is None:
            raise InvalidRequest(f"{pointer}/$ref: {reference!r} is not in the schema")
        return self._leaves(target, path)

    def _product(self, parts: Iterable[list[Node]]) -> list[Node]:
        found: dict[Node, None] = {(): None}
        for part in parts:
            pairs = ((left, right) for left in found for right in part)
            found = {tuple(dict.fromkeys((*left, *right))): None for left, right in pairs}
            if len(found) > MAX_ALTERNATIVES:
                raise GrammarTooComplex("a part of the schema has too many alternatives")
        return list(found)

    # ── values ───────────────────────────────────────────────────────────────────────────────────

    def _filter(self, shape: Shape) -> None:
        """Removes listed values that other keywords forbid."""
        if shape.literals is None:
            return
        shape.literals = [each for each in shape.literals if fits(self, each, shape)]
        shape.kinds &= frozenset(map(kind_of, shape.literals))

    def _has_value(self, node: Node, known: Set[Node]) -> bool:
        self.count_step()
        return any(self._has_value_by(shape, known) for shape in self.alternatives(node))

    def has_value(self, shape: Shape) -> bool:
        """Whether a value matches the shape, as far as nodes are known to be finite."""
        return self._has_value_by(shape, self._finite)

    def _has_value_by(self, shape: Shape, known: Set[Node]) -> bool:
        """Whether a value matches the shape if the nodes in `known` have values."""
        if shape.literals is not None:
            return bool(shape.literals)
        return any(self._has_kind(shape, kind, known) for kind in shape.written)

    def _has_kind(self, shape: Shape, kind: Kind, known: Set[Node]) -> bool:
        match kind:
            case "string":
                return shape.least_chars <= shape.most_chars
            case "number":
                low, high = shape.bounds.get("minimum"), shape.bounds.get("maximum")
                return low is None or high is None or low <= high
            case "array":
                return self._has_array(shape, known)
            case "object":
                named, required, _ = members(self.document, shape)
                return all(named[name] in known for name in required)
        return True

    def _has_array(self, shape: Shape, known: Set[Node]) -> bool:
        if shape.least_items > shape.most_items:
            return False
        heads, rest = items(self.document, shape)
        needed = heads[: shape.least_items]
        needed += [rest] if shape.least_items > len(heads) else []
        return all(each in known for each in needed)

    def _is_disjoint(self, pointer: Pointer) -> bool:
        """Whether it is proven that no value matches two branches of a `oneOf`."""
        branches = [self.alternatives((each,)) for each in self._one_ofs[pointer]]
        pairs = (
            (left, right)
            for index, branch in enumerate(branches)
            for other in branches[:index]
            for left in branch
            for right in other
        )
        return all(self._are_disjoint(left, right) for left, right in pairs)

    def _are_disjoint(self, left: Shape, right: Shape) -> bool:
        common = left.kinds & right.kinds
        if not common:
            return True
        if left.literals is not None and right.literals is not None:
            return lists_disjoint(left.literals, right.literals)
        if left.literals is not None or right.literals is not None:
            listed, other = (left, right) if left.literals is not None else (right, left)
            return not any(fits(self, each, other) for each in listed.literals or ())
        return common == {"object"} and self._has_tag(left, right)

    def _has_tag(self, left: Shape, right: Shape) -> bool:
        """Whether a required property has disjoint listed values in both shapes."""
        named, required, _ = members(self.document, left)
        others, needed, _ = members(self.document, right)
        return any(
            lists_disjoint(first, second)
            for name in required & needed
            if (first := self._listed(named[name])) is not None
            and (second := self._listed(others[name])) is not None
        )

    def _listed(self, node: Node) -> list[Any] | None:
        lists = [each.literals for each in self.alternatives(node)]
        if any(each is None for each in lists):
            return None
        return [value for each in lists for value in each or ()]


def _listed(schema: dict[str, Any], keyword: str, pointer: Pointer) -> list[Any]:
    found = schema.get(keyword, [])
    if not isinstance(found, list):
        raise InvalidRequest(f"{pointer}/{keyword} is no list")
    return found


def has_no_finite_value(schema: Any) -> bool:
    """Whether each value would have to contain another of its own schema, without an end. False
    also if this cannot be decided.
    """
    try:
        return not SchemaGraph(schema).is_finite(ROOT)
    except (InvalidRequest, TypeError, AttributeError, KeyError, RecursionError):
        return False


def has_references(schema: Any) -> bool:
    """Whether the schema has a `$ref`: only then may a value contain another of its own schema."""
    waiting = [schema]
    while waiting:
        each = waiting.pop()
        if isinstance(each, dict):
            if "$ref" in each:
                return True
            waiting += each.values()
        elif isinstance(each, list):
            waiting += each
    return False
