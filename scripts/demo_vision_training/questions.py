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
    kind: str
    images: list[Image.Image]
    question: str
    answer: str


def case(number: int, kind: str | None = None) -> Case:
    """Returns the case of this number, of a kind by chance if none is given."""
    chance = random.Random(number)
    return KINDS[kind or chance.choices(list(KINDS), weights=WEIGHTS)[0]](chance)


def _what(chance: random.Random) -> Case:
    thing = random_thing(chance)
    question, answer = chance.choice(
        [
            ("What is in this picture?", f"A {thing.named}."),
            ("What do you see?", f"A {thing.named}."),
            ("What shape is this?", f"A {thing.shape}."),
            ("Which shape is in the picture?", f"A {thing.shape}."),
            ("What colour is the shape?", f"{thing.colour.capitalize()}."),
            ("What colour is this?", f"{thing.colour.capitalize()}."),
        ]
    )
    image = draw_things(chance, [thing], chance.uniform(0.2, 0.38))
    return Case("what", [image], question, answer.replace("A orange", "An orange"))


def _how_many(chance: random.Random) -> Case:
    thing, number = random_thing(chance), chance.randint(1, 6)
    question = chance.choice([f"How many {_many(thing.shape)} are there?", "How many shapes?"])
    answer = f"{NUMBERS[number - 1].capitalize()}."
    return Case("how many", [draw_count(chance, thing, number)], question, answer)


def _digit(chance: random.Random) -> Case:
    digit, colour = chance.randint(0, 9), chance.choice(list(COLOURS))
    question = chance.choice(["Which digit is this?", "What number do you see?", "Read the digit."])
    return Case("digit", [draw_digit(chance, digit, colour)], question, f"{digit}.")


def _where(chance: random.Random) -> Case:
    places = chance.sample([each for each in PLACES if each != "middle"], 2)
    things = [random_thing(chance, place=each) for each in places]
    if things[0].named == things[1].named:
        return _where(chance)
    asked = things[0]
    image = draw_things(chance, things)
    if chance.random() < 0.5:
        question, answer = f"Where is the {asked.named}?", f"At the {asked.place}."
    else:
        question, answer = f"What is at the {asked.place}?", f"A {asked.named}."
    return Case("where", [image], question, answer.replace("A orange", "An orange"))


def _two_pictures(chance: random.Random) -> Case:
    first, second = random_thing(chance), random_thing(chance)
    if chance.random() < 0.5:
        second = Thing(first.shape, second.colour)
    images = [draw_things(chance, [each], chance.uniform(0.2, 0.38)) for each in (first, second)]
    question, answer = chance.choice(
        [
            ("Do both pictures show the same shape?", _yes(first.shape == second.shape)),
            ("What is in the second picture?", f"A {second.named}."),
            ("What is in the first picture?", f"A {first.named}."),
        ]
    )
    return Case("two pictures", images, question, answer.replace("A orange", "An orange"))


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
