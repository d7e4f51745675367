"""What a shared cache is worth: time to the first token of a long prompt that another server has computed before.

    python benchmarks/global_cache.py [--model demo] [--tokens 2000] [--rounds 5]

Two servers are started as processes of their own, with one Mooncake master. Each round has a prompt of its own. The
first server computes it; the second one gets it from the first one's memory, and must answer with the same tokens. For
comparison it computes another prompt of the same length.
"""

from __future__ import annotations

import socket
import statistics
import sys
import time
from contextlib import AbstractContextManager, ExitStack

import openai
from prefix_client import ask, parse_options, random_prompt, run_server
from rich.progress import track

LARGEST_RATIO = 0.35


def main() -> int:
    options = parse_options(__doc__)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        master = f"127.0.0.1:{probe.getsockname()[1]}"
    with ExitStack() as stack:
        first, second = (stack.enter_context(serve(options.model, master, options.threads)) for _ in range(2))
        ask(first, random_prompt(options.tokens))
        ask(second, random_prompt(options.tokens))
        cold, shared = [], []
        for _ in track(range(options.rounds), description="rounds"):
            prompt = random_prompt(options.tokens)
            computed = ask(first, prompt)
            time.sleep(0.5)  # blocks are stored beside the answer
            fetched = ask(second, prompt)
            if fetched.text != computed.text:
                print("error: the servers answer differently", file=sys.stderr)
                return 1
            if fetched.num_cached_tokens < options.tokens // 2:
                print("error: the second server has found nothing", file=sys.stderr)
                return 1
            cold.append(ask(second, random_prompt(options.tokens)).ttft_s)
            shared.append(fetched.ttft_s)
    ratio = statistics.median(shared) / statistics.median(cold)
    print(
        f"{options.tokens} tokens: first token after {statistics.median(cold) * 1e3:.0f} ms computed, "
        f"{statistics.median(shared) * 1e3:.0f} ms from another server: {ratio:.2f} (must be at most {LARGEST_RATIO})"
    )
    return 0 if ratio <= LARGEST_RATIO else 1


def serve(model: str, master: str, threads: int) -> AbstractContextManager[openai.OpenAI]:
    """A server on the shared cache, and a client of it."""
    flags = ["--mooncake-service-endpoint", "P2PHANDSHAKE", "--mooncake-master-server-addr", master]
    flags += ["--mooncake-global-segment-size", "1GiB", "--threads", str(threads)]
    return run_server(model, flags, {"ENABLE_GLOBAL_CACHE_HOOK": "1"}, settle_s=1.0)  # for a master just started


if __name__ == "__main__":
    sys.exit(main())
