"""The example, beside a server."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_example_shows_what_the_server_caches(
    serve_demo: Callable[..., AbstractContextManager[str]], tmp_path: Path
) -> None:
    endpoint = f"ipc://{tmp_path}/events"
    addresses = ("--endpoint", endpoint, "--replay-endpoint", f"{endpoint}.replay")
    command = [sys.executable, "examples/watch_kv_events.py", *addresses]
    with serve_demo("--kv-events", "zmq", "--kv-events-endpoint", endpoint) as greeting:
        match = re.search(r"http://\S+", greeting)
        assert match is not None
        body = json.dumps({"prompt": "word " * 100, "sampling_config": {"max_new_tokens": 1}, "stream": False})
        request = urllib.request.Request(f"{match[0]}/generate", body.encode(), {"Content-Type": "application/json"})
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as watcher:
            try:
                assert watcher.stdout is not None
                assert watcher.stdout.readline().endswith("in the cache: no blocks\n")
                urllib.request.urlopen(request).read()
                lines = iter(watcher.stdout.readline, "")
                assert any("in the cache: group 0: 6 blocks" in line for line in lines)
            finally:
                watcher.kill()
