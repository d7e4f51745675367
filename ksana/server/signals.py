"""SIGTERM and SIGINT as something to wait for."""

from __future__ import annotations

import asyncio
import signal

_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopSignals:
    """Counts the requests to stop. The first asks for an orderly end, the second for an immediate one."""

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()
        self.last: signal.Signals = signal.SIGTERM

    def install(self) -> None:
        """Take the signals over from Python; must be called on the main thread, in its running loop."""
        loop = asyncio.get_running_loop()
        for number in _STOP_SIGNALS:
            loop.add_signal_handler(number, self._on_signal, number)

    def _on_signal(self, number: signal.Signals) -> None:
        self.last = number
        (self.second if self.first.is_set() else self.first).set()
