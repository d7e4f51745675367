"""``ksana-perf grid``: a series of batches that shows how the time of a step depends on what is in it."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from ksana.cli.flags import CommandParser, at_least
from ksana.perf.config import Batch, BatchConfig, RequestGroup
from ksana.perf.json_files import write_json

_SHORTEST_PREFILL = 8
_SHORTEST_CONTEXT = 64


def grid_command(argv: list[str]) -> int:
    """Run ``ksana-perf grid``; returns the exit code."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    if arguments.help:
        parser.print_help()
        return 0
    batches = make_grid(arguments.max_tokens, arguments.max_context, arguments.max_requests)
    if arguments.output:
        write_json(Path(arguments.output), batches)
    else:
        print(batches.model_dump_json(indent=2, exclude_defaults=True))
    return 0


def make_grid(max_tokens: int, max_context: int, max_requests: int) -> BatchConfig:
    """Prefills, decodes and mixtures of the two, their sizes in powers of two.

    Args:
        max_tokens: most tokens of one step.
        max_context: most cached tokens of one request.
        max_requests: most requests of one step.
    """
    contexts = _powers(_SHORTEST_CONTEXT, max_context, factor=4)
    prefills = _powers(_SHORTEST_PREFILL, max_tokens, factor=2)
    counts = _powers(1, min(max_requests, max_tokens), factor=2)
    found = [
        *(_batch((length, context, 1)) for length in prefills for context in (0, *contexts)),
        *(_batch((1, context, count)) for count in counts for context in contexts),
        *_several_prefills(prefills, counts, max_tokens),
        *_mixtures(prefills, _powers(1, min(max_requests, max_tokens) - 1, factor=4), contexts, max_tokens),
    ]
    return BatchConfig(batches=list({batch.label: batch for batch in found}.values()))


def _several_prefills(prefills: list[int], counts: list[int], max_tokens: int) -> Iterator[Batch]:
    """The same number of tokens in more requests: what a request costs beside its tokens."""
    for count in counts[1:]:
        length = max((length for length in prefills if length * count <= max_tokens), default=0)
        if length:
            yield _batch((length, 0, count))


def _mixtures(prefills: list[int], counts: list[int], contexts: list[int], max_tokens: int) -> Iterator[Batch]:
    """Decodes that share their step with a prompt, the everyday step of a loaded server."""
    for count in counts:
        for context in contexts[::2]:
            for length in prefills[1::3]:
                if length + count <= max_tokens:
                    yield _batch((1, context, count), (length, 0, 1))


def _batch(*groups: tuple[int, int, int]) -> Batch:
    return Batch(
        requests=[
            RequestGroup(forwarding_token_num=length, kv_cached_token_num=context, request_num=count)
            for length, context, count in groups
        ]
    )


def _powers(first: int, last: int, *, factor: int) -> list[int]:
    """``first``, ``first * factor`` and so on, and ``last`` itself."""
    found = []
    value = first
    while value < last:
        found.append(value)
        value *= factor
    return [*found, last] if last > 0 else found


def _parser() -> CommandParser:
    parser = CommandParser(
        prog="ksana-perf grid",
        usage="ksana-perf grid [flags] > batch_config.json",
        description="Write batches that cover the steps of a server: prefills, decodes, and both together.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("-h", "--help", action="store_true", help="show this text")
    parser.add_argument("--output", metavar="FILE", help="write to a file, as a whole or not at all")
    for flag, default, text in (
        ("--max-tokens", 1024, "most tokens of a step; not above --max-num-batched-tokens"),
        ("--max-context", 1024, "most cached tokens of a request; 0: only prompts from their beginning"),
        ("--max-requests", 32, "most requests of a step; not above --max-num-seqs"),
    ):
        least = 0 if flag == "--max-context" else 1
        parser.add_argument(
            flag, metavar="N", type=at_least(least), default=default, help=f"{text} (default: {default})"
        )
    return parser
