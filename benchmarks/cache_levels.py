"""What a prefix costs that is cached: on the device, in host blocks, on disk, or not at all.

    python benchmarks/cache_levels.py [--model demo] [--tokens 2000] [--rounds 5]

The device's cache has room for four prompts, so that four others drive the blocks of one into the host's memory. For
the disk the server is started anew. All answers to a prompt must be equal, whatever they begin with.
"""

from __future__ import annotations

import statistics
import sys
import tempfile

import openai
from prefix_client import Answer, ask, parse_options, random_prompt, run_server
from rich.progress import track

BLOCK_SIZE = 16
DEVICE_PROMPTS = 4
LEVELS = ("computed", "device", "host", "disk")


def main() -> int:
    options = parse_options(__doc__)
    num_blocks = DEVICE_PROMPTS * (options.tokens // BLOCK_SIZE + 2)
    with tempfile.TemporaryDirectory(prefix="ksana-cache-levels-") as folder:
        flags = ["--num-blocks", str(num_blocks), "--block-size", str(BLOCK_SIZE), "--threads", str(options.threads)]
        flags += ["--host-memory-factor", "4", "--kv-connector", "local_disk", "--kv-disk-path", folder]
        prompts = [random_prompt(options.tokens) for _ in range(options.rounds)]
        with run_server(options.model, flags) as client:
            answers = [ask_thrice(client, prompt) for prompt in track(prompts, description="device and host")]
        with run_server(options.model, flags) as client:
            ask(client, random_prompt(options.tokens))
            for row, prompt in zip(answers, track(prompts, description="disk"), strict=True):
                row.append(ask(client, prompt))
    return report(answers, options.tokens)


def ask_thrice(client: openai.OpenAI, prompt: list[int]) -> list[Answer]:
    """Computed, from the device, and from the host."""
    computed, device = ask(client, prompt), ask(client, prompt)
    for _ in range(DEVICE_PROMPTS):
        ask(client, random_prompt(len(prompt)))
    return [computed, device, ask(client, prompt)]


def report(answers: list[list[Answer]], num_tokens: int) -> int:
    """Print medians; the exit code is 1 if an answer is wrong, or was not made from the cache."""
    for row in answers:
        if len({answer.text for answer in row}) > 1:
            print("error: answers to one prompt differ", file=sys.stderr)
            return 1
        if any(answer.num_cached_tokens < num_tokens - 2 * BLOCK_SIZE for answer in row[1:]):
            print(f"error: not cached: {[answer.num_cached_tokens for answer in row]}", file=sys.stderr)
            return 1
    medians = [statistics.median(row[level].ttft_s for row in answers) for level in range(len(LEVELS))]
    print(f"first token of {num_tokens} tokens, median of {len(answers)}:")
    for level, median in zip(LEVELS, medians, strict=True):
        print(f"  {level:<10}{median * 1e3:8.1f} ms  {median / medians[0]:.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
