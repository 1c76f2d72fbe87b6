"""The features that a worker of this code has, as its model card announces them.

A request names the features that it needs: workers without one of them get no part of it. A name
has a version, such as `grammar/1`: what changes its meaning changes its name, so that workers of
several releases can serve one model.
"""

from __future__ import annotations

FEATURES: tuple[str, ...] = ()
