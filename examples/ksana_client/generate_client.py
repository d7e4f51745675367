"""Streams an answer of ``POST /generate`` to the terminal. Needs nothing but Python.

python generate_client.py --prompt "Once upon a time" --max-new-tokens 64
"""

from __future__ import annotations

import argparse
import json
import urllib.request
from collections.abc import Iterator
from typing import Any

PIECE_BYTES = 4096


def main() -> None:
    """Print the text as it comes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8080", help="of the server")
    parser.add_argument("--prompt", default="Once upon a time")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0)
    arguments = parser.parse_args()
    sampling = {"max_new_tokens": arguments.max_new_tokens, "temperature": arguments.temperature, "topk": 0}
    printed = 0
    for chunk in generate(arguments.url, arguments.prompt, sampling):
        # Every chunk holds the whole text so far.
        text = chunk["texts"][0]
        print(text[printed:], end="", flush=True)
        printed = len(text)
    print()


def generate(url: str, prompt: str, sampling_config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The chunks of an answer.

    Raises:
        RuntimeError: the request failed after the answer had begun.
    """
    body = {"prompt": prompt, "sampling_config": sampling_config, "stream": True}
    request = urllib.request.Request(
        f"{url}/generate", json.dumps(body).encode(), headers={"Content-Type": "application/json"}
    )
    unfinished = b""
    with urllib.request.urlopen(request) as response:
        while data := response.read1(PIECE_BYTES):
            # A zero byte ends each chunk; pieces of the network know nothing of that.
            *chunks, unfinished = (unfinished + data).split(b"\0")
            for chunk in map(json.loads, chunks):
                if "error" in chunk:
                    raise RuntimeError(chunk["error"]["message"])
                yield chunk


if __name__ == "__main__":
    main()
