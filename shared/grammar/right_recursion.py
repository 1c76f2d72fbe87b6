"""Writes rules of Lark that end in themselves, or in each other, with repetitions: equal in their
outputs.

x: a x | b x | c                   ──▶   x: (a | b)* c
x: a ("," x)?                      ──▶   x: (a ",")* a
x: x "+" x | "-" x | a             ──▶   x: "-"* a ("+" "-"* a)*
x: a y | b,  y: c x                ──▶   x: (a c)* b,  y: c x

The parser retains all open repetitions of a right-recursive rule: each token takes longer than the
one before, and after 2,000 of them the output ends. Rules of one cycle are linear equations, which
are solved one after another.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Set
from itertools import chain

from shared.errors import GrammarTooComplex, InvalidRequest
from shared.grammar.lark_rules import Alternatives, Item, Items, Rule, rules_of, size_of

MAX_GROWTH = 10_000  # of one equation, beyond the rules: it can double with each rule
MAX_NAMES = 4  # in an error

_Branch = tuple[Items, str | None]  # what stands before the rule of the cycle that ends it, if any


def without_right_recursion(source: str) -> str:
    """A rule that has no end, or that cannot be read, stays as it is. Raises InvalidRequest,
    GrammarTooComplex for other rules that end in themselves and cannot be written so.
    """
    try:
        rules = rules_of(source)
        named = {each.name: each for each in rules if each.name is not None}
        if len(named) < sum(each.name is not None for each in rules):
            return source  # a grammar within the grammar
        written = dict(_written(named))
    except RecursionError:  # as deep as this the grammar is refused anyway
        return source
    return "".join(written.get(each.name or "", each).text for each in rules)


def _written(rules: Mapping[str, Rule]) -> Iterator[tuple[str, Rule]]:
    ends = {
        name: set(_ends(each.alternatives or ())) & rules.keys() for name, each in rules.items()
    }
    for cycle in _cycles(ends):
        equations = {name: list(_branches(rules[name], cycle)) for name in cycle}
        for name, alternatives in _solved(equations).items():
            yield name, rules[name].with_body(alternatives)


def _ends(alternatives: Alternatives) -> Iterator[str]:
    """The names at the ends of alternatives, also of those in groups."""
    for *_, last in filter(None, alternatives):
        if isinstance(last.atom, str):
            yield last.atom
        else:
            yield from _ends(last.atom)


# ── cycles ───────────────────────────────────────────────────────────────────────────────────────


def _cycles(ends: Mapping[str, Set[str]]) -> Iterator[list[str]]:
    """The strongly connected sets of rules, each in the order of the grammar."""
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
    """All rules, each after those that it reaches, unless these reach it."""
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
    """`done`: those of earlier calls, to which these are added."""
    found, waiting = [], [name]
    while waiting:
        each = waiting.pop()
        if each not in done:
            done.add(each)
            found.append(each)
            waiting += users[each]
    return found


# ── equations ────────────────────────────────────────────────────────────────────────────────────


def _branches(rule: Rule, cycle: Collection[str]) -> Iterator[_Branch]:
    """Raises InvalidRequest."""
    if rule.has_attributes:
        raise InvalidRequest(_refusal(cycle, "with attributes"))
    yield from _of_alternatives(rule.alternatives or (), cycle)


def _of_alternatives(alternatives: Alternatives, cycle: Collection[str]) -> Iterator[_Branch]:
    for items in alternatives:
        if set(_ends((items,))).isdisjoint(cycle):
            yield items, None
            continue
        before, last = items[:-1], items[-1]
        if last.operator not in ("", "?"):
            raise InvalidRequest(_refusal(cycle, "within a repetition"))
        if last.operator:
            yield before, None
        if isinstance(last.atom, str):
            yield before, last.atom
        else:
            for inner, name in _of_alternatives(last.atom, cycle):
                yield before + inner, name


def _refusal(cycle: Collection[str], where: str) -> str:
    some = [each[:64] for each in sorted(cycle)[:MAX_NAMES]]
    names = ", ".join(some) + (" and others" if len(cycle) > MAX_NAMES else "")
    subject = (
        f"the rule {names} ends in itself" if len(cycle) == 1 else f"{names} end in each other"
    )
    return f"{subject} {where}: write a repetition instead, such as (…)*"


def _solved(equations: dict[str, list[_Branch]]) -> dict[str, Alternatives]:
    """Each rule by the rules after it. Empty where a rule has no end."""
    solved: dict[str, Alternatives] = {}
    names = list(equations)
    most = MAX_GROWTH + 4 * sum(map(_size, chain.from_iterable(equations.values())))
    for index, name in enumerate(names):
        branches = list(_bounded(_without_own(name, equations[name], names), most, names))
        if not branches:
            return {}
        solved[name] = _factored(tuple(items + _call(target) for items, target in branches))
        for other in names[index + 1 :]:
            inserted = _inserted(equations[other], name, branches)
            equations[other] = list(_bounded(inserted, most, names))
    return solved


def _size(branch: _Branch) -> int:
    return size_of(branch[0]) + 1


def _bounded(branches: Iterable[_Branch], most: int, cycle: Collection[str]) -> Iterator[_Branch]:
    """Raises GrammarTooComplex."""
    size = 0
    for each in branches:
        size += _size(each)
        if size > most:
            raise GrammarTooComplex(_refusal(cycle, "in too many ways"))
        yield each


def _factored(alternatives: Alternatives) -> Alternatives:
    """With the repetition that all begin with, written once."""
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


def _without_own(name: str, branches: list[_Branch], cycle: Collection[str]) -> list[_Branch]:
    """The branches, none of which ends in the rule itself. Raises InvalidRequest."""
    own = [items for items, target in branches if target == name and items]
    others = [each for each in branches if each[1] != name]
    if not any(items[0] == Item(name) for items in own):
        loop = _repeated(own)
        return [(loop + items, target) for items, target in others]
    if any(target is not None for _, target in others):
        raise InvalidRequest(_refusal(cycle, "and begin so"))
    operand = _operand(name, own, [items for items, _ in others])
    infixes = tuple(items[1:] for items in own if items[0] == Item(name))
    return [((*operand, Item(((Item(infixes), *operand),), "*")), None)] if operand else []


def _operand(name: str, own: list[Items], others: list[Items]) -> Items:
    """What infix operators stand between, with its prefixes and suffixes."""
    suffixed = [items[1:] for items in others if items[:1] == (Item(name),)]
    plain = tuple(items for items in others if items[:1] != (Item(name),))
    prefixes = [items for items in own if items[0] != Item(name)]
    return (*_repeated(prefixes), Item(plain), *_repeated(suffixed)) if plain else ()


def _repeated(items: list[Items]) -> Items:
    full = tuple(filter(None, items))
    return (Item(full, "*"),) if full else ()
