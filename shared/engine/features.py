"""The features that a worker of this code has, as its model card announces them.

A request names the features that it needs: workers without one of them get no part of it. A name
has a version, such as `grammar/1`: what changes its meaning changes its name, so that workers of
several releases can serve one model.
"""

from __future__ import annotations

from shared.grammar.spec import GRAMMAR_FEATURE
from shared.grammar.thinking import THINKING_FEATURE
from shared.pixels.pixel_frames import IMAGES_FEATURE
from shared.sites.kv_targets import KV_FROM_SITES

FEATURES: tuple[str, ...] = (GRAMMAR_FEATURE, THINKING_FEATURE)


def features_of(
    *, has_vocabulary: bool, takes_kv_from_sites: bool = False, takes_images: bool = False
) -> tuple[str, ...]:
    """Returns the features of a worker. With `has_vocabulary` it can sample under a grammar, or
    samples no tokens.
    """
    features = FEATURES if has_vocabulary else tuple(f for f in FEATURES if f != GRAMMAR_FEATURE)
    features = (*features, IMAGES_FEATURE) if takes_images else features
    return (*features, KV_FROM_SITES) if takes_kv_from_sites else features
