"""Draws pictures of what the model learns to see: shapes, colours, counts, digits and places."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from PIL import Image, ImageDraw, ImageFont

SIDE = 128  # pixels drawn; the processor makes tiles of them
COLOURS = {
    "red": (214, 40, 40),
    "green": (46, 160, 67),
    "blue": (38, 90, 220),
    "yellow": (245, 205, 40),
    "purple": (140, 60, 190),
    "orange": (245, 130, 30),
    "black": (20, 20, 20),
    "white": (250, 250, 250),
}
BACKGROUNDS = ((235, 235, 230), (200, 215, 230), (120, 120, 120), (60, 70, 80), (250, 235, 215))
SHAPES = ("circle", "square", "triangle", "star", "cross")
# x and y of the middle, in parts of the side
PLACES = {
    "top left": (0.27, 0.27),
    "top right": (0.73, 0.27),
    "bottom left": (0.27, 0.73),
    "bottom right": (0.73, 0.73),
    "middle": (0.5, 0.5),
}


@dataclass(frozen=True)
class Thing:
    """A shape of a colour; `place` is one of PLACES."""

    shape: str
    colour: str
    place: str = "middle"

    @property
    def named(self) -> str:
        return f"{self.colour} {self.shape}"


def random_thing(chance: random.Random, *, place: str = "middle") -> Thing:
    return Thing(chance.choice(SHAPES), chance.choice(list(COLOURS)), place)


def draw_things(chance: random.Random, things: list[Thing], size: float = 0.22) -> Image.Image:
    """Draws things at their places; `size` is the radius in parts of the side."""
    image = _canvas(chance, [COLOURS[each.colour] for each in things])
    for each in things:
        x, y = (part + chance.uniform(-0.04, 0.04) for part in PLACES[each.place])
        radius = size * chance.uniform(0.75, 1.05)
        _draw(image, each.shape, COLOURS[each.colour], (x, y), radius, chance.uniform(-0.3, 0.3))
    return _noisy(chance, image)


def draw_count(chance: random.Random, thing: Thing, number: int) -> Image.Image:
    """Draws `number` equal shapes in a grid of 3 x 3, without overlap."""
    image = _canvas(chance, [COLOURS[thing.colour]])
    for cell in chance.sample(range(9), number):
        x, y = (0.2 + 0.3 * part + chance.uniform(-0.03, 0.03) for part in (cell % 3, cell // 3))
        radius = chance.uniform(0.08, 0.11)
        _draw(image, thing.shape, COLOURS[thing.colour], (x, y), radius, chance.uniform(-0.3, 0.3))
    return _noisy(chance, image)


def draw_digit(chance: random.Random, digit: int, colour: str) -> Image.Image:
    image = _canvas(chance, [COLOURS[colour]])
    font = ImageFont.load_default(chance.randint(70, 105))
    at = tuple(SIDE * (0.5 + chance.uniform(-0.1, 0.1)) for _ in range(2))
    layer = Image.new("RGBA", image.size)
    ImageDraw.Draw(layer).text(at, str(digit), COLOURS[colour], font=font, anchor="mm")
    layer = layer.rotate(chance.uniform(-15, 15), Image.Resampling.BICUBIC)
    image.paste(layer, mask=layer)
    return _noisy(chance, image)


def _canvas(chance: random.Random, colours: list[tuple[int, int, int]]) -> Image.Image:
    """Returns a background on which all colours show."""
    fitting = [each for each in BACKGROUNDS if all(_differ(each, other) for other in colours)]
    return Image.new("RGB", (SIDE, SIDE), chance.choice(fitting or [(120, 120, 120)]))


def _differ(a: tuple[int, ...], b: tuple[int, ...]) -> bool:
    return math.dist(a, b) > 90


def _draw(
    image: Image.Image,
    shape: str,
    colour: tuple[int, int, int],
    middle: tuple[float, float],
    radius: float,
    angle: float,
) -> None:
    x, y, r = (SIDE * each for each in (*middle, radius))
    pen = ImageDraw.Draw(image)
    if shape == "circle":
        pen.ellipse((x - r, y - r, x + r, y + r), fill=colour)
        return
    corners = _corners(shape)
    points = [
        (x + r * length * math.sin(turn + angle), y - r * length * math.cos(turn + angle))
        for turn, length in corners
    ]
    pen.polygon(points, fill=colour)


def _corners(shape: str) -> list[tuple[float, float]]:
    """Returns angles and distances from the middle."""
    full = 2 * math.pi
    if shape == "square":
        return [(full * (i + 0.5) / 4, 1.1) for i in range(4)]
    if shape == "triangle":
        return [(full * i / 3, 1.15) for i in range(3)]
    if shape == "star":
        return [(full * i / 10, 1.2 if i % 2 == 0 else 0.5) for i in range(10)]
    arm, inner = 0.3, 0.42  # a cross: twelve corners
    return [
        (full * i / 4 + turn, length)
        for i in range(4)
        for turn, length in ((-arm, 1.1), (arm, 1.1), (full / 8, inner))
    ]


def _noisy(chance: random.Random, image: Image.Image) -> Image.Image:
    """Adds weak noise, so that no two pictures are equal."""
    noise = Image.effect_noise((SIDE, SIDE), chance.uniform(4, 18)).convert("RGB")
    return Image.blend(image, noise, 0.06)
