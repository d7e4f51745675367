"""What is in a server's KV cache, and what happens to it.

Start a server with ``ksana-serve --model demo --kv-events zmq``, then ``python examples/watch_kv_events.py``. It shows
all events, those that were missed too, by way of the content that they make. Needs ``pip install '.[events]'``.
"""

from __future__ import annotations

import argparse
import contextlib

from ksana.kv_events.mirror import CacheMirror
from ksana.kv_events.transports.zmq_mirror import ZmqMirror
from ksana.types.kv_events import AllBlocksCleared, BlockStored, KVCacheEvent


def describe(event: KVCacheEvent) -> str:
    """One line about an event."""
    if isinstance(event, AllBlocksCleared):
        return "cleared"
    kind = "stored" if isinstance(event, BlockStored) else "removed"
    hashes = " ".join(f"{block_hash:016x}" for block_hash in event.block_hashes[:4])
    return f"{kind} {len(event.block_hashes)} blocks of group {event.group_id}: {hashes}"


def summary(mirror: CacheMirror) -> str:
    """One line about the content."""
    groups = mirror.content.groups.items()
    return ", ".join(f"group {group_id}: {len(group.blocks)} blocks" for group_id, group in groups) or "no blocks"


def main() -> None:
    """Follow a server until the user has seen enough."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--endpoint", default="tcp://127.0.0.1:5557")
    parser.add_argument("--replay-endpoint", default="tcp://127.0.0.1:5558")
    options = parser.parse_args()
    shown = None
    with ZmqMirror(options.endpoint, options.replay_endpoint) as source:
        while True:
            for batch in source.poll(timeout_s=1.0):
                for event in batch.events:
                    print(batch.event_id, describe(event))
            if source.mirror.is_complete and source.mirror.last_id != shown:
                shown = source.mirror.last_id
                print(shown, "in the cache:", summary(source.mirror), flush=True)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
