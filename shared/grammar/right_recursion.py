"""Writes rules of Lark that end in themselves, or in each other, with repetitions: equal in their
outputs.

x: a x | b x | c                   ──▶   x: (a | b)* c
x: a ("," x)?                      ──▶   x: (a ",")* a
x: a ("," x)*                      ──▶   x: a ("," a)*
x: x "+" x | "-" x | a             ──▶   x: "-"* a ("+" "-"* a)*
x: a y | b,  y: c x                ──▶   x: (a c)* b,  y: c x

The parser retains all open repetitions of a right-recursive rule: each token takes longer than the
one before, and after 2,000 of them it fails, in the middle of an answer. Rules of one cycle are
linear equations, which are solved one after another. Those whose solution is unknown or large are
refused.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from itertools import chain

from shared.errors import GrammarTooComplex
from shared.grammar.lark_rules import Alternatives, Item, Items, Rule, depth_of, rules_of, size_of
from shared.grammar.spec import MAX_SOURCE_BYTES

MAX_GROWTH = 32 * 1024  # characters of one equation, beyond the rules: four times with each rule
MAX_WRITTEN = MAX_SOURCE_BYTES // 2  # bytes of all rules: a request may have several grammars
MAX_STEPS = 200_000  # steps of a cycle, each of which copies a part of an equation: 0.5 s
MAX_DEPTH = 28  # nested groups: the parser refuses more
MAX_NAMED = 4  # rules that an error names
REPETITION = "*"  # the name of the one at the end of rules of a cycle; "x*": x, and then that

_Branch = tuple[Items, str | None]  # the items before the rule of the cycle that ends it, if any


class _NotWritable(Exception):
    """The rules of a cycle have no known equivalent, or it is large."""


def without_right_recursion(source: str) -> str:
    """Replaces right recursion by repetition. A rule that has no end, or that cannot be read, stays
    as it is. Raises GrammarTooComplex for one that cannot be written so.
    """
    try:
        rules = rules_of(source)
        named = {each.name: each for each in rules if each.name is not None}
        if len(named) < sum(each.name is not None for each in rules):
            return source  # a grammar within the grammar
        written = dict(_written(named))
    except RecursionError:  # the grammar is refused anyway if it is as deep as this
        return source
    result = "".join(written.get(each.name or "", each).text for each in rules)
    if len(result.encode()) > max(MAX_WRITTEN, len(source)):
        raise _refused(list(written))
    return result


def _written(rules: Mapping[str, Rule]) -> Iterator[tuple[str, Rule]]:
    ends = {
        name: set(_ends(each.alternatives or ())) & rules.keys() for name, each in rules.items()
    }
    for cycle in _cycles(ends):
        try:
            solved = _solved(_equations({name: rules[name] for name in cycle}))
        except _NotWritable:
            raise _refused(cycle) from None
        for name in solved.keys() & rules.keys():
            yield name, rules[name].with_body(solved[name])


def _refused(names: Sequence[str]) -> GrammarTooComplex:
    named = ", ".join(names[:MAX_NAMED]) + (", …" if len(names) > MAX_NAMED else "")
    return GrammarTooComplex(
        f"no repetition is known for rules that end in themselves or in each other: {named}; "
        "their output would fail after 2,000 tokens. Write them with * or +"
    )


def _ends(alternatives: Alternatives) -> Iterator[str]:
    """Returns the names at the ends of alternatives, also of those in groups."""
    for *_, last in filter(None, alternatives):
        if isinstance(last.atom, str):
            yield last.atom
        else:
            yield from _ends(last.atom)


def _ends_in(items: Items, cycle: Collection[str]) -> bool:
    return any(each in cycle for each in _ends((items,)))


# ── cycles ───────────────────────────────────────────────────────────────────────────────────────


def _cycles(ends: Mapping[str, Set[str]]) -> Iterator[list[str]]:
    """Returns the strongly connected sets of rules, each in the order of the grammar."""
    places = {name: place for place, name in enumerate(ends)}
    users: dict[str, list[str]] = {name: [] for name in ends}
    for name, targets in ends.items():
        for each in targets:
            users[each].append(name)
    done = set[str]()
    for name in reversed(_finished(ends)):
        cycle = _reached(name, users, done)
        if len(cycle) > 1 or name in ends[name]:
            yield sorted(cycle, key=places.__getitem__)


def _finished(ends: Mapping[str, Set[str]]) -> list[str]:
    """Returns all rules, each after those that it reaches, unless these reach it."""
    order, seen = [], set[str]()
    waiting = [(name, False) for name in ends]
    while waiting:
        name, is_finished = waiting.pop()
        if is_finished:
            order.append(name)
        elif name not in seen:
            seen.add(name)
            waiting.append((name, True))
            waiting += [(each, False) for each in ends[name]]
    return order


def _reached(name: str, users: Mapping[str, list[str]], done: set[str]) -> list[str]:
    """Returns `name` and the rules that lead to it, without those in `done`, which gets them."""
    found, waiting = [], [name]
    while waiting:
        each = waiting.pop()
        if each not in done:
            done.add(each)
            found.append(each)
            waiting += users[each]
    return found


# ── equations ────────────────────────────────────────────────────────────────────────────────────


def _equations(cycle: Mapping[str, Rule]) -> dict[str, list[_Branch]]:
    """Returns the equations of a cycle's rules. Raises _NotWritable."""
    if any(each.has_attributes for each in cycle.values()):
        raise _NotWritable
    bodies = {name: each.alternatives or () for name, each in cycle.items()}
    equations = {name: list(_branches(each, cycle)) for name, each in bodies.items()}
    repeated = {each for body in bodies.values() for each in _repeated_ends(body, cycle)}
    return _with_repetition(equations, *repeated) if repeated else equations


def _with_repetition(
    equations: dict[str, list[_Branch]], repeated: Alternatives, *others: Alternatives
) -> dict[str, list[_Branch]]:
    """Adds a repetition to equations: the rules end in any number of `repeated`, of which any
    number may follow these, which is any number again. Raises _NotWritable if `others` are
    repeated, too.
    """
    inner = list(_branches(repeated, equations))
    if others or any(_begins(each, equations) for each in chain(inner, *equations.values())):
        raise _NotWritable
    followed = {f"{name}*": list(_followed(each)) for name, each in equations.items()}
    return {REPETITION: [((), None), *_followed(inner)], **followed, **equations}


def _followed(branches: Iterable[_Branch]) -> Iterator[_Branch]:
    """Returns the branches, and then the repetition."""
    for items, target in branches:
        yield items, f"{(target or '').removesuffix(REPETITION)}{REPETITION}"


def _begins(branch: _Branch, cycle: Collection[str]) -> bool:
    (items, _) = branch
    return bool(items) and isinstance(items[0].atom, str) and items[0].atom in cycle


def _repeated_ends(alternatives: Alternatives, cycle: Collection[str]) -> Iterator[Alternatives]:
    """Yields the repetitions at the ends of the alternatives that end in the cycle."""
    for *_, last in filter(None, alternatives):
        if _ends_in((last,), cycle):
            if last.operator in ("*", "+"):
                yield _group(last)
            if not isinstance(last.atom, str):
                yield from _repeated_ends(last.atom, cycle)


def _group(item: Item) -> Alternatives:
    return ((Item(item.atom),),) if isinstance(item.atom, str) else item.atom


def _branches(alternatives: Alternatives, cycle: Collection[str]) -> Iterator[_Branch]:
    """Yields the branches of a rule. Raises _NotWritable."""
    for items in alternatives:
        if _ends_in(items, cycle):
            yield from ((items[:-1] + inner, name) for inner, name in _last(items[-1], cycle))
        else:
            yield items, None


def _last(item: Item, cycle: Collection[str]) -> Iterator[_Branch]:
    """Returns the branches of an item that ends in the cycle. Raises _NotWritable."""
    if item.operator not in ("", "?", "*", "+"):
        raise _NotWritable
    if item.operator == "*":
        yield (), REPETITION
        return
    if item.operator == "?":
        yield (), None
    inner = _branches(item.atom, cycle) if not isinstance(item.atom, str) else [((), item.atom)]
    yield from _followed(inner) if item.operator == "+" else inner


def _solved(equations: dict[str, list[_Branch]]) -> dict[str, Alternatives]:
    """Returns each rule by rules that are solved later, which are those with infix operators: what
    such a rule ends in must be known. Empty where a rule has no end. Raises _NotWritable.
    """
    solved: dict[str, Alternatives] = {}
    names = sorted(
        equations, key=lambda name: any(_begins(each, (name,)) for each in equations[name])
    )
    users = _RuleUsers(equations)
    num_steps, most = 0, MAX_GROWTH + 4 * sum(map(_size, chain.from_iterable(equations.values())))
    for name in names:
        branches = list(_united(_bounded(_without_own(name, equations[name]), most), equations))
        if not branches:
            return {}
        solved[name] = _factored(tuple(items + _call(target) for items, target in branches))
        for other in [each for each in users.of(name) if each not in solved]:
            num_steps += _num_parts(equations[other]) + _num_parts(branches)
            if num_steps > MAX_STEPS:
                raise _NotWritable
            inserted = _bounded(_inserted(equations[other], name, branches), most)
            equations[other] = list(_united(inserted, equations))
            users.add(other, equations[other])
    size = sum(size_of(items) for each in solved.values() for items in each)
    if size > most or any(depth_of(each) > MAX_DEPTH for each in solved.values()):
        raise _NotWritable
    return solved


class _RuleUsers:
    """The rules whose equations have, or had, branches that end in a rule."""

    def __init__(self, equations: Mapping[str, Sequence[_Branch]]) -> None:
        self._users: dict[str, set[str]] = {name: set() for name in equations}
        for name, branches in equations.items():
            self.add(name, branches)

    def add(self, name: str, branches: Sequence[_Branch]) -> None:
        for _, target in branches:
            if target is not None:
                self._users[target].add(name)

    def of(self, name: str) -> set[str]:
        return self._users[name]


def _num_parts(branches: Sequence[_Branch]) -> int:
    return sum(1 + len(each) for items, _ in branches for each in _opened(items))


def _united(branches: Iterable[_Branch], cycle: Collection[str]) -> Iterator[_Branch]:
    """Returns one branch for each target, besides those that begin with a rule of the cycle."""
    by_target: dict[str | None, list[Items]] = {}
    for each in branches:
        if _begins(each, cycle):
            yield each
        else:
            by_target.setdefault(each[1], []).extend(_opened(each[0]))
    for target, found in by_target.items():
        yield found[0] if len(found) == 1 else (Item(tuple(found)),), target


def _opened(items: Items) -> Alternatives:
    """Returns the alternatives of a group that stands alone."""
    if len(items) == 1 and not items[0].operator and not isinstance(items[0].atom, str):
        return items[0].atom
    return (items,)


def _size(branch: _Branch) -> int:
    return size_of(branch[0]) + 1


def _bounded(branches: Iterable[_Branch], most: int) -> Iterator[_Branch]:
    """Yields the branches. Raises _NotWritable if they are larger than `most`."""
    size = 0
    for each in branches:
        size += _size(each)
        if size > most:
            raise _NotWritable
        yield each


def _factored(alternatives: Alternatives) -> Alternatives:
    """Writes the repetition with which all alternatives begin only once."""
    loop = alternatives[0][:1]
    if len(alternatives) < 2 or not all(loop and each[:1] == loop for each in alternatives):
        return alternatives
    return ((*loop, Item(tuple(each[1:] for each in alternatives))),)


def _call(name: str | None) -> Items:
    return () if name is None else (Item(name),)


def _inserted(branches: list[_Branch], name: str, ends: list[_Branch]) -> Iterator[_Branch]:
    for items, target in branches:
        if target != name:
            yield items, target
        else:
            yield from ((items + after, last) for after, last in ends)


def _without_own(name: str, branches: list[_Branch]) -> list[_Branch]:
    """Returns the branches, none of which ends in the rule itself. Raises _NotWritable."""
    own = [items for items, target in branches if target == name and items]
    others = [each for each in branches if each[1] != name]
    if not any(items[0] == Item(name) for items in own):
        loop = _repeated(own)
        return [(loop + items, target) for items, target in others]
    if any(target is not None for _, target in others):
        raise _NotWritable
    operand = _operand(name, own, [items for items, _ in others])
    infixes = tuple(items[1:] for items in own if items[0] == Item(name))
    return [((*operand, Item(((Item(infixes), *operand),), "*")), None)] if operand else []


def _operand(name: str, own: list[Items], others: list[Items]) -> Items:
    """Returns the operands of infix operators, with their prefixes and suffixes."""
    suffixed = [items[1:] for items in others if items[:1] == (Item(name),)]
    plain = tuple(items for items in others if items[:1] != (Item(name),))
    prefixes = [items for items in own if items[0] != Item(name)]
    return (*_repeated(prefixes), Item(plain), *_repeated(suffixed)) if plain else ()


def _repeated(items: list[Items]) -> Items:
    full = tuple(filter(None, items))
    return (Item(full, "*"),) if full else ()
