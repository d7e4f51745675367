"""What the two sides of a KV connector tell each other, as far as the core carries or reads it."""

from __future__ import annotations

from dataclasses import dataclass, field


class ConnectorMetadata:
    """What a connector's scheduler side tells its worker side about one step. Opaque to the core."""

    __slots__ = ()


@dataclass(slots=True)
class KVConnectorOutput:
    """What a connector's worker side has found done by the end of a step.

    Attributes:
        finished_sending: requests of which nothing is read any more; blocks kept for that may be freed.
        finished_receiving: requests whose load has ended, well or not.
        invalid_blocks: (KV cache group, block id) of blocks that were to be loaded and hold something else.
    """

    finished_sending: set[str] = field(default_factory=set)
    finished_receiving: set[str] = field(default_factory=set)
    invalid_blocks: set[tuple[int, int]] = field(default_factory=set)

    @property
    def is_empty(self) -> bool:
        """True if it says nothing."""
        return not (self.finished_sending or self.finished_receiving or self.invalid_blocks)
