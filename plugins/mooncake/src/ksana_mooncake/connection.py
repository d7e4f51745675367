"""Keeps a client connected to the store, and everybody off it while it is not worth asking."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

from ksana_mooncake.backoff import Backoff
from ksana_mooncake.client import BROKEN, INVALID, OK, StoreClient, describe

logger = logging.getLogger("ksana.mooncake")

_FIRST_WAIT_S = 0.25
_LONGEST_WAIT_S = 30.0
_TRIES_BEFORE_COMPLAINT = 4
"""A master that is being started beside us takes a moment. What it refuses so often, it will always refuse."""

_SLOW_TRY_S = 2.0
"""A try that fails after so long has held up everybody: Mooncake lets nothing else run while it connects."""

_LONGEST_CLOSE_S = 5.0
_PROBE_KEY = "ksana-probe"


class RefusalError(Exception):
    """The store can be reached and does not want us."""


class Connection:
    """A client, a circuit breaker in front of it, and a thread that brings it back.

    A failure of the network opens the circuit at once, so nobody waits for a second one. The thread then asks for a
    sign of life, at intervals that grow until a block has really been moved.

    Args:
        create: makes a client that is not yet connected.
        name: of the store, for the log.
        on_loss: called when the store is lost, and what was known of its content is void.
    """

    def __init__(self, create: Callable[[], StoreClient], name: str, on_loss: Callable[[], None]) -> None:
        self._create = create
        self._name = name
        self._on_loss = on_loss
        self._regions: list[tuple[int, int]] = []
        self._client: StoreClient | None = None  # has connected once, whether it is up or not
        self._is_up = False
        self._lock = threading.Lock()
        self._lost = threading.Event()
        self._closing = threading.Event()
        self._has_left = threading.Event()
        self._backoff = Backoff(_FIRST_WAIT_S, _LONGEST_WAIT_S)
        self._failed_tries = 0
        self._num_refusals = 0
        self._has_complained = False
        self._thread = threading.Thread(target=self._run, name="mooncake-connection", daemon=True)

    def start(self) -> None:
        """Begin to connect, in the background."""
        self._thread.start()

    def register(self, address: int, size: int) -> None:
        """Allow transfers to and from a region of memory, now or as soon as there is a connection."""
        with self._lock:
            self._regions.append((address, size))
            client = self._client
        if client is not None:
            client.register(address, size)

    @property
    def is_up(self) -> bool:
        """True if it is worth asking; costs nothing."""
        return self._is_up

    def reach(self) -> StoreClient | None:
        """The client, if its master answers just now."""
        client = self._client
        if client is None or not self._is_up:
            return None
        if not client.is_reachable():
            self._lose("its master does not answer")
            return None
        return client

    def report(self, codes: Sequence[int]) -> None:
        """Take note of a call's answers: the store is lost if they are nothing but failures of the network."""
        if codes and all(code in BROKEN for code in codes):
            self._lose(describe(codes[0]))

    def report_transfer(self, codes: Sequence[int]) -> None:
        """The same for blocks that were to be moved: one that was proves that all is well."""
        self.report(codes)
        if any(code >= OK for code in codes):
            self._backoff.reset()
            if self._has_complained:
                self._has_complained = False
                logger.info("%s works again", self._name)

    def close(self) -> None:
        """Leave the store; what takes longer than some seconds goes on in the background.

        Mooncake's own client lets no other thread of the interpreter run meanwhile, for two seconds. It would be many
        if its master did not answer: then the thread waits for the master, and nobody for the thread.
        """
        with self._lock:
            self._is_up = False
            self._closing.set()
        self._lost.set()
        self._has_left.wait(_LONGEST_CLOSE_S)

    def _lose(self, reason: str) -> None:
        with self._lock:
            if not self._is_up:
                return
            self._is_up = False
        self._on_loss()
        self._complain(reason)
        self._lost.set()

    def _complain(self, reason: str) -> None:
        if not self._has_complained:
            self._has_complained = True
            logger.warning("%s is out of reach (%s): prompts are computed here until it is back", self._name, reason)

    def _run(self) -> None:
        try:
            self._keep()
            if self._client is not None:
                self._leave(self._client)
        except RefusalError as error:
            logger.error("%s is switched off until the next start: %s", self._name, error)
        finally:
            self._has_left.set()

    def _keep(self) -> None:
        while not self._closing.is_set():
            if self._bring_up():
                self._lost.wait()
                self._lost.clear()
            self._closing.wait(self._backoff.take())

    def _leave(self, client: StoreClient) -> None:
        if not client.is_reachable():
            logger.info("%s does not answer: it finds out by itself that this server has left", self._name)
            self._has_left.set()
            while not client.is_reachable():
                time.sleep(_LONGEST_WAIT_S)
        client.close()

    def _bring_up(self) -> bool:
        try:
            if self._client is None:
                self._connect()
            else:
                _ask_for_life(self._client)
        except RefusalError as error:
            self._num_refusals += 1
            if self._num_refusals == _TRIES_BEFORE_COMPLAINT:
                raise
            logger.debug("%s does not want us: %s", self._name, error)
            return False
        except Exception as error:
            logger.debug("connecting to the global cache has failed", exc_info=True)
            self._num_refusals = 0
            self._failed_tries += 1
            if self._failed_tries == _TRIES_BEFORE_COMPLAINT:
                self._complain(str(error))
            return False
        self._num_refusals = self._failed_tries = 0
        with self._lock:
            self._is_up = not self._closing.is_set()
        return True

    def _connect(self) -> None:
        """Connect a new client.

        Raises:
            RefusalError: Mooncake does not like what it is told.
            ConnectionError: something else is in the way.
        """
        client = self._create()
        started = time.monotonic()
        try:
            code = client.connect()
        except (TypeError, ValueError) as error:  # of its Python binding
            raise RefusalError(str(error).partition("\n")[0]) from error
        if code:
            reason = f"{describe(code)}; Mooncake's own lines on stderr say more"
            if time.monotonic() - started > _SLOW_TRY_S:
                self._backoff.skip()
                self._complain(reason)
            # Mooncake says the same when it loses its master while it connects.
            raise (RefusalError if code == INVALID and client.is_reachable() else ConnectionError)(reason)
        with self._lock:
            self._client = client
            regions = list(self._regions)
        for address, size in regions:
            client.register(address, size)
        logger.info("connected to %s", self._name)


def _ask_for_life(client: StoreClient) -> None:
    if not client.is_reachable():
        raise ConnectionError("its master does not answer")
    (code,) = client.exists([_PROBE_KEY])
    if code < OK:
        raise ConnectionError(describe(code))
