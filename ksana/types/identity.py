"""Who sent a request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Identity:
    """A client that has proved who it is.

    Attributes:
        name: of the client, for limits and logs; never its key.
        attributes: what else is known about it, for plugins that ask.
    """

    name: str
    attributes: Mapping[str, object] = field(default_factory=dict)


ANONYMOUS = Identity("anonymous")
"""Whoever uses a server that asks nobody."""
