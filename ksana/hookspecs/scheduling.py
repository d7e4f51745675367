"""Hooks through which parts of the scheduler join."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ksana.markers import hookspec

if TYPE_CHECKING:
    from ksana.scheduling.drafter import Drafter
    from ksana.types.config import SpeculationConfig


@hookspec(firstresult=True)
def ksana_create_drafter(config: SpeculationConfig) -> Drafter | None:
    """Create the drafter that ``config.method`` names, or return None if the name is not yours.

    When: once an engine at start, if speculative decoding is asked for. Firstresult. Raise
    :class:`ksana.errors.UsageError` if your part of the configuration cannot work.

    Example::

        @hookimpl
        def ksana_create_drafter(config):
            if config.method == "mine":
                return MyDrafter()
    """
