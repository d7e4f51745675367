"""The flags of ``ksana-bench``.

Names that KsanaLLM's benchmark has for the same thing are accepted beside ours.
"""

from __future__ import annotations

import argparse
import math
from argparse import BooleanOptionalAction, Namespace
from collections.abc import Sequence
from pathlib import Path

from ksana.bench import flag_types as types
from ksana.bench.options import LengthRange
from ksana.cli.flags import CommandParser, at_least
from ksana.errors import UsageError
from ksana.plugin.messages import nearest

_EPILOG = """\
examples:
  ksana-bench --port 8080                            64 random prompts of 128 tokens, all at once
  ksana-bench --concurrency 32 --num-requests 320 --input-len 512 --output-len 64:256
  ksana-bench --request-rate 4 --poisson --plot run.png --json run.json
  ksana-bench --max-ttft 0.5 --num-requests 200      the highest rate with a mean TTFT of half a second
  ksana-bench --trace conversation.jsonl --speedup 10 --trace-duration 600
  ksana-bench --prompts questions.csv --api chat --output-csv answers.csv
  ksana-bench diff old.csv new.csv                   compare two files of answers
  ksana-bench limits                                 what this machine's memory and processors can do at most

Exit code: 0 if every request was answered, 1 if some failed or answers differ too much, 2 for a wrong command line or
no server, 130 after Ctrl-C, which prints the report of what there is.
"""


def bench_parser() -> CommandParser:
    """The command line of a run."""
    parser = CommandParser(
        prog="ksana-bench",
        usage="ksana-bench [flags]\n       ksana-bench limits [flags]\n       ksana-bench diff EXPECTED ACTUAL [flags]",
        description="Put load on an OpenAI-compatible or Ksana server, and report how it fares.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("-h", "--help", action="store_true", help="show this text")
    parser.add_argument("--version", action="store_true", help="show the version")
    _add_server(parser.add_argument_group("server"))
    _add_workload(parser.add_argument_group("requests"))
    _add_trace(parser.add_argument_group("trace replay"))
    _add_sampling(parser.add_argument_group("sampling"))
    _add_arrival(parser.add_argument_group("arrival"))
    _add_repeat(parser.add_argument_group("repetition and rate search"))
    _add_output(parser.add_argument_group("results"))
    return parser


def parse_flags(parser: CommandParser, argv: Sequence[str]) -> Namespace:
    """Parse ``argv``.

    Raises:
        UsageError: a flag is unknown, with the nearest known one, or a value is wrong.
    """
    namespace, unknown = parser.parse_known_args(argv)
    if unknown:
        name = unknown[0].partition("=")[0]
        if not name.startswith("-"):
            raise UsageError(f"unexpected argument {name!r}; there are the commands limits and diff, and flags")
        known = [flag for action in parser._actions for flag in action.option_strings]
        raise UsageError(f"unknown flag {name}{nearest(name, known)}")
    return namespace


def add_diff_flags(group: argparse._ActionsContainer) -> None:
    """How answers are compared, for a run and for ``ksana-bench diff``."""
    group.add_argument(
        "--diff-rouge-threshold",
        type=types.number(positive=False),
        default=0.5,
        metavar="F",
        help="answers with a lower ROUGE-W F1 are suspicious (default: 0.5)",
    )
    group.add_argument(
        "--diff-mismatch-threshold",
        type=at_least(0),
        default=0,
        metavar="N",
        help="answers that differ within their first N characters are suspicious too (default: 0)",
    )
    group.add_argument("--diff-output", "--diff-output-file", type=Path, metavar="FILE", help="write the comparison")


def _add_server(group: argparse._ArgumentGroup) -> None:
    add, seconds = group.add_argument, types.number(positive=True)
    add("--host", default="127.0.0.1", help="one or several, with commas (default: 127.0.0.1)")
    add("--port", default="8080", help="one or several, with commas (default: 8080)")
    add("--base-url", metavar="URL", help="instead of host and port; one or several, with commas")
    add(
        "--api",
        choices=("auto", "completions", "chat", "generate"),
        default="auto",
        help="what to send; auto: /v1/completions if the server lists its models, otherwise /generate (default: auto)",
    )
    add("--model", metavar="NAME", help="name to send (default: the first that the server lists)")
    add("--api-key", metavar="KEY", help="sent as a bearer token (default: the variable OPENAI_API_KEY)")
    add("--header", type=types.header, action="append", default=[], metavar="'NAME: VALUE'", help="may be repeated")
    add(
        "--client-timeout",
        type=seconds,
        default=600.0,
        metavar="S",
        help="longest time for a whole request, in seconds (default: 600)",
    )
    add(
        "--stall-timeout",
        type=seconds,
        default=300.0,
        metavar="S",
        help="longest silence of the server within a request, the wait for its first byte included (default: 300)",
    )
    add(
        "--wait",
        type=types.number(positive=False),
        default=0.0,
        metavar="S",
        help="wait so long for the server to start (default: 0)",
    )


def _add_workload(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--num-requests",
        "--prompt-num",
        type=at_least(0),
        metavar="N",
        help="requests of a run; 0: all of a file (default: 64 random ones, or all of a file)",
    )
    add(
        "--input-len",
        "--random-input-len",
        type=types.length_range,
        default=LengthRange(128, 128),
        metavar="N[:M]",
        help="tokens of a random prompt, or the range to draw them from (default: 128)",
    )
    add(
        "--output-len",
        "--max-new-tokens",
        type=types.length_range,
        default=LengthRange(64, 64),
        metavar="N[:M]",
        help="most tokens to generate, or the range to draw them from (default: 64)",
    )
    add(
        "--shared-prefix-len",
        type=at_least(0),
        default=0,
        metavar="N",
        help="the first N tokens of random prompts are the same (default: 0)",
    )
    add(
        "--num-prefixes",
        type=at_least(1),
        default=1,
        metavar="N",
        help="different shared prefixes, used in turn (default: 1)",
    )
    add(
        "--token-range",
        type=types.token_range,
        default=(1000, 10000),
        metavar="LOW:HIGH",
        help="random token ids are from LOW to HIGH - 1 (default: 1000:10000)",
    )
    add(
        "--prompts",
        "--input-csv",
        "--dataset-path",
        type=Path,
        metavar="FILE",
        help="prompts from a CSV file, or a .jsonl file with prompt, input_tokens or messages, and max_tokens",
    )
    add(
        "--col-idx",
        type=types.column,
        default=0,
        metavar="COLUMN",
        help="of the CSV: index from 0, or name if the first line is a header (default: 0)",
    )
    add("--shuffle", action="store_true", help="shuffle the prompts of the file")
    add("--seed", type=at_least(0), default=0, metavar="N", help="of everything that is drawn (default: 0)")
    add("--prefix-seed", type=at_least(0), metavar="N", help="of the shared prefixes (default: --seed)")


def _add_trace(group: argparse._ArgumentGroup) -> None:
    add, positive = group.add_argument, types.number(positive=True)
    add("--trace", type=Path, metavar="FILE", help="replay JSON lines with timestamp, lengths and hash_ids")
    add("--speedup", type=positive, default=1.0, metavar="F", help="replay so many times as fast (default: 1)")
    add("--trace-duration", type=positive, default=math.inf, metavar="S", help="only the first S seconds of the trace")
    add("--max-input-len", type=at_least(1), metavar="N", help="cut longer prompts, before scaling")
    add("--max-output-len", type=at_least(1), metavar="N", help="cut longer answers, before scaling")
    add(
        "--trace-scale",
        type=positive,
        metavar="F",
        help="factor on all lengths (default: as small as the longest request needs to fit the model)",
    )
    add("--max-model-len", type=at_least(2), metavar="N", help="context of the model, if the server does not tell")
    add("--trace-block-size", type=at_least(1), default=512, metavar="N", help="tokens per hash id (default: 512)")


def _add_sampling(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--stream", action=BooleanOptionalAction, default=True, help="streamed answers (default) or whole ones")
    add(
        "--ignore-eos",
        action=BooleanOptionalAction,
        default=None,
        help="generate to the full length (default: for random prompts and traces)",
    )
    add("--temperature", type=types.number(positive=False), default=0.0, metavar="F", help="0 is greedy (default: 0)")
    add("--top-k", "--topk", type=at_least(0), metavar="N", help="draw from the N likeliest tokens")
    add(
        "--top-p",
        "--topp",
        type=types.number(positive=True),
        metavar="F",
        help="draw from the likeliest, of that probability",
    )
    add("--stop", "--stop-strings", nargs="+", default=[], metavar="TEXT", help="texts that end an answer")
    add("--stop-token-ids", type=at_least(0), nargs="+", default=[], metavar="ID", help="tokens that end an answer")
    add("--extra-body", type=types.json_object, default={}, metavar="JSON", help="further fields of every request")


def _add_arrival(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--request-rate",
        type=types.number(positive=True),
        default=math.inf,
        metavar="F",
        help="requests a second; inf: all at once (default: inf)",
    )
    add("--poisson", "--random", action="store_true", help="exponential gaps between requests instead of even ones")
    add(
        "--burst",
        type=at_least(1),
        default=1,
        metavar="N",
        help="so many requests leave together, at the same rate; KsanaLLM calls this --concurrency (default: 1)",
    )
    add("--concurrency", type=at_least(1), metavar="N", help="at most N requests in flight (default: no limit)")


def _add_repeat(group: argparse._ArgumentGroup) -> None:
    add, bound = group.add_argument, types.number(positive=True)
    add("--warmups", "--warmup-num-iters", type=at_least(0), default=0, metavar="N", help="unreported runs first")
    add("--repeats", "--repeat-num-iters", type=at_least(1), default=1, metavar="N", help="runs at each rate")
    add(
        "--max-ttft",
        "--max-first-token-latency",
        type=bound,
        default=math.inf,
        metavar="S",
        help="search for the highest rate that keeps the time to first token within S seconds",
    )
    add(
        "--max-latency",
        "--max-avg-latency",
        type=bound,
        default=math.inf,
        metavar="S",
        help="the same for the time of a whole request; both bounds may be given",
    )
    add(
        "--bound-statistic",
        type=types.statistic,
        default="mean",
        metavar="NAME",
        help="what is bounded: mean, or a percentile like p99 (default: mean)",
    )
    add(
        "--num-rates",
        "--request-rate-num-iters",
        type=at_least(1),
        metavar="N",
        help="most rates to try (default: 12 in a search, otherwise 1)",
    )
    add(
        "--rate-step",
        "--request-rate-step",
        type=types.number(positive=True),
        default=1.0,
        metavar="F",
        help="without bounds, each rate is so much higher than the one before (default: 1)",
    )


def _add_output(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--json", type=Path, metavar="FILE", help="write all figures")
    add("--details", action="store_true", help="put every request, and when its pieces came, into the JSON")
    add("--csv", "--perf-csv", type=Path, metavar="FILE", help="write a row for each run, with KsanaLLM's columns")
    add("--output-csv", type=Path, metavar="FILE", help="write the answers of the last run, one a row")
    add("--plot", type=Path, metavar="FILE", help="draw distributions and the course of time: .png, .svg or .pdf")
    add(
        "--percentiles",
        type=types.percentiles,
        default=(50, 90, 95, 99),
        metavar="P,...",
        help="to report (default: 50,90,95,99)",
    )
    add("--diff-check", type=Path, metavar="FILE", help="compare the answers with those of an earlier --output-csv")
    add_diff_flags(group)
