"""Pictures with a question and its answer. Everything follows from a number."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from PIL import Image

from demo_vision_training.drawings import (
    COLOURS,
    PLACES,
    Thing,
    draw_count,
    draw_digit,
    draw_things,
    random_thing,
)

NUMBERS = ("one", "two", "three", "four", "five", "six")
HELD_OUT = 1 << 40  # numbers of pictures that are never trained on begin here


@dataclass(frozen=True)
class Case:
    """Pictures, and questions about them with their answers; tests ask the first one."""

    kind: str
    images: list[Image.Image]
    turns: list[tuple[str, str]]

    @property
    def question(self) -> str:
        return self.turns[0][0]

    @property
    def answer(self) -> str:
        return self.turns[0][1]


def case(number: int, kind: str | None = None) -> Case:
    """Returns the case of this number, of a kind by chance if none is given."""
    chance = random.Random(number)
    return KINDS[kind or chance.choices(list(KINDS), weights=WEIGHTS)[0]](chance)


def _case(
    chance: random.Random, kind: str, images: list[Image.Image], asked: list[tuple[list[str], str]]
) -> Case:
    """Returns a case with one question for each of `asked`: one of its wordings, and the answer."""
    turns = [(chance.choice(wordings), answer) for wordings, answer in asked]
    return Case(kind, images, chance.sample(turns, len(turns)))


def _what(chance: random.Random) -> Case:
    thing = random_thing(chance)
    asked = [
        (["What is in this picture?", "What do you see?"], _a(thing.named)),
        (["What shape is this?", "Which shape is in the picture?"], _a(thing.shape)),
        (["What colour is the shape?", "What colour is this?"], f"{thing.colour.capitalize()}."),
    ]
    image = draw_things(chance, [thing], chance.uniform(0.2, 0.38))
    return _case(chance, "what", [image], asked)


def _how_many(chance: random.Random) -> Case:
    thing, number = random_thing(chance), chance.randint(1, 6)
    wordings = [f"How many {_many(thing.shape)} are there?", "How many shapes?"]
    asked = [(wordings, f"{NUMBERS[number - 1].capitalize()}.")]
    return _case(chance, "how many", [draw_count(chance, thing, number)], asked)


def _digit(chance: random.Random) -> Case:
    digit, colour = chance.randint(0, 9), chance.choice(list(COLOURS))
    wordings = ["Which digit is this?", "What number do you see?", "Read the digit."]
    return _case(chance, "digit", [draw_digit(chance, digit, colour)], [(wordings, f"{digit}.")])


def _where(chance: random.Random) -> Case:
    places = chance.sample([each for each in PLACES if each != "middle"], 2)
    things = [random_thing(chance, place=each) for each in places]
    if things[0].named == things[1].named:
        return _where(chance)
    asked = [([f"Where is the {each.named}?"], f"At the {each.place}.") for each in things]
    asked += [([f"What is at the {each.place}?"], _a(each.named)) for each in things]
    return _case(chance, "where", [draw_things(chance, things)], asked)


def _two_pictures(chance: random.Random) -> Case:
    first, second = random_thing(chance), random_thing(chance)
    if chance.random() < 0.5:
        second = Thing(first.shape, second.colour)
    images = [draw_things(chance, [each], chance.uniform(0.2, 0.38)) for each in (first, second)]
    asked = [
        (["Do both pictures show the same shape?"], _yes(first.shape == second.shape)),
        (["What is in the second picture?"], _a(second.named)),
        (["What is in the first picture?"], _a(first.named)),
    ]
    return _case(chance, "two pictures", images, asked)


def _a(named: str) -> str:
    return f"An {named}." if named.startswith("orange") else f"A {named}."


def _yes(holds: bool) -> str:
    return "Yes." if holds else "No."


def _many(shape: str) -> str:
    return f"{shape}es" if shape.endswith("s") else f"{shape}s"


WEIGHTS = (3, 3, 3, 3, 2)  # of KINDS
KINDS: dict[str, Callable[[random.Random], Case]] = {
    "what": _what,
    "how many": _how_many,
    "digit": _digit,
    "where": _where,
    "two pictures": _two_pictures,
}
