"""What an address says of who listens there."""

from __future__ import annotations

import socket
import threading

from ksana_mooncake.addresses import Address


def test_a_process_that_hangs_does_not_answer_although_it_can_be_connected_to() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = Address("127.0.0.1", server.getsockname()[1])
        assert not address.answers(0.05)
        thread = threading.Thread(target=lambda: [server.accept()[0].close() for _ in range(2)])
        thread.start()
        assert address.answers(10.0)
        thread.join()
    assert not address.answers(10.0)
