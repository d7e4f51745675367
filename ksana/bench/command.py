"""The command ``ksana-bench``."""

from __future__ import annotations

import math
import platform
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ksana
from ksana.bench.flag_options import diff_options, make_options
from ksana.bench.flags import add_diff_flags, bench_parser, parse_flags
from ksana.bench.options import BenchOptions, DiffOptions, OutputOptions
from ksana.cli.flags import CommandParser, at_least
from ksana.cli.output_files import check_writable, write_file
from ksana.cli.startup import EXIT_INTERRUPTED, EXIT_OK, run_command
from ksana.errors import UsageError
from ksana.stdout import show

if TYPE_CHECKING:
    from ksana.bench.metrics import Metrics
    from ksana.bench.runner import BenchResult

EXIT_FAILED = 1

Command = Callable[[list[str]], int]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code.

    0: every request was answered. 1: some were not, or answers differ too much from those expected. 2: the command
    line is wrong, or there is no server. 130: Ctrl-C.
    """
    return run_command("ksana-bench", _dispatch, argv)


def _dispatch(argv: list[str]) -> int:
    commands: dict[str, Command] = {"limits": _limits, "diff": _diff}
    if argv and argv[0] in commands:
        return commands[argv[0]](argv[1:])
    return _bench(argv)


def _bench(argv: list[str]) -> int:
    parser = bench_parser()
    flags = parse_flags(parser, argv)
    if flags.help:
        parser.print_help()
        return EXIT_OK
    if flags.version:
        print(f"ksana {ksana.__version__}")
        return EXIT_OK
    options = make_options(flags)
    _check_outputs(options.output)
    import uvloop  # like aiohttp, which the runner loads: --help and the like start without

    from ksana.bench.report import print_report, render_metrics, render_rates
    from ksana.bench.runner import keeps_bounds, run_benchmark

    def report(metrics: Metrics) -> None:
        print_report(render_metrics(metrics, options.output.percentiles))

    started = time.time()
    result = uvloop.run(run_benchmark(options, report))
    if len(result.plan.outcomes) > 1:
        runs, statistic = [run for run, _ in result.runs], options.repeat.bound_statistic
        print_report(render_rates(runs, result.plan, statistic, lambda run: keeps_bounds(run, options.repeat)))
    _write_results(options, result, started)
    alike = _check_answers(options.output, result)
    if result.interrupted:
        return EXIT_INTERRUPTED
    answered = all(metrics.num_completed == metrics.num_planned for metrics, _ in result.runs)
    return EXIT_OK if answered and alike else EXIT_FAILED


def _check_outputs(output: OutputOptions) -> None:
    """Refuse before the first request what could not be written, or compared, after the last."""
    from ksana.bench.diff import read_texts
    from ksana.bench.plot import check_plot

    for path in (output.json, output.csv, output.texts, output.plot, output.diff.output):
        if path is not None:
            check_writable(path)
    if output.plot is not None:
        check_plot(output.plot)
    if output.expected is not None:
        read_texts(output.expected, "--diff-check")


def _write_results(options: BenchOptions, result: BenchResult, started: float) -> None:
    from ksana.bench.export import write_json, write_perf_csv, write_texts

    output = options.output
    if not result.runs:
        return
    if output.json is not None:
        write_json(output.json, _document(options, result, started))
    if output.csv is not None:
        write_perf_csv(output.csv, [metrics for metrics, _ in result.runs], output.percentiles)
    if output.texts is not None:
        write_texts(output.texts, _answers(result))
    if output.plot is not None:
        from ksana.bench.plot import draw

        draw(output.plot, result.runs, title=f"{result.server.model or result.server.api} at {options.server.urls[0]}")


def _document(options: BenchOptions, result: BenchResult, started: float) -> dict[str, Any]:
    from ksana.bench.export import SCHEMA, metrics_dict, record_dict
    from ksana.bench.rate_search import RateSearch

    runs = []
    for metrics, load in result.runs:
        run = metrics_dict(metrics, options.output.percentiles)
        if options.output.details:
            run["records"] = [record_dict(record, load.start_s) for record in load.records]
        runs.append(run)
    document: dict[str, Any] = {
        "schema": SCHEMA,
        "ksana_version": ksana.__version__,
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(started)),
        "client": {"machine": platform.platform(), "python": platform.python_version()},
        "server": {"urls": options.server.urls, "api": result.server.api, "model": result.server.model},
        "workload": result.workload.describe(),
        "interrupted": result.interrupted,
        "runs": runs,
    }
    if isinstance(result.plan, RateSearch):
        document["rate_search"] = {
            "bounds": {"statistic": options.repeat.bound_statistic, **_bounds(options)},
            "kept": {f"{rate:g}": kept for rate, kept in sorted(result.plan.outcomes.items())},
            "highest_rate": result.plan.best,
            "ended_because": result.plan.ended_because,
        }
    return document


def _bounds(options: BenchOptions) -> dict[str, float | None]:
    bounds = {"ttft_s": options.repeat.max_ttft_s, "latency_s": options.repeat.max_latency_s}
    return {name: None if math.isinf(bound) else bound for name, bound in bounds.items()}


def _answers(result: BenchResult) -> list[str | None]:
    """The answers of the last run, in the order of the workload; None where there is none."""
    _, load = result.runs[-1]
    texts: list[str | None] = [None] * load.num_planned
    for record in load.records:
        texts[record.index] = None if record.failure else record.text
    return texts


def _check_answers(output: OutputOptions, result: BenchResult) -> bool:
    if output.expected is None or not result.runs:
        return True
    from ksana.bench.diff import read_texts

    return _compare(
        read_texts(output.expected, "--diff-check"), _answers(result), str(output.expected), options=output.diff
    )


def _compare(expected: Sequence[str], actual: Sequence[str | None], where: str, *, options: DiffOptions) -> bool:
    """Report the comparison; returns whether nothing in it is suspicious."""
    from ksana.bench.diff import compare_texts, render_diff

    diffs = compare_texts(expected, actual, where)
    text = render_diff(diffs, options)
    if options.output is not None:
        write_file(options.output, lambda part: part.write_text(text + "\n", encoding="utf-8"))
        text = f"{text.partition(chr(10))[0]}; see {options.output}"
    show(text)
    return not any(diff.is_suspicious(options) for diff in diffs)


def _diff(argv: list[str]) -> int:
    parser = CommandParser(
        prog="ksana-bench diff",
        usage="ksana-bench diff EXPECTED ACTUAL [flags]",
        description="Compare two files of answers that --output-csv wrote. Exit code 1 if any are suspicious.",
    )
    parser.add_argument("-h", "--help", action="store_true", help="show this text")
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE")
    add_diff_flags(parser)
    flags = parse_flags(parser, argv)
    if flags.help:
        parser.print_help()
        return EXIT_OK
    if len(flags.files) != 2:
        raise UsageError("diff compares two files: ksana-bench diff EXPECTED ACTUAL")
    from ksana.bench.diff import read_texts

    expected, actual = flags.files
    alike = _compare(
        read_texts(expected, "diff"), read_texts(actual, "diff"), str(expected), options=diff_options(flags)
    )
    return EXIT_OK if alike else EXIT_FAILED


def _limits(argv: list[str]) -> int:
    parser = CommandParser(
        prog="ksana-bench limits",
        usage="ksana-bench limits [flags]",
        description="Measure how fast this machine reads memory and multiplies matrices, with one thread and with all.",
    )
    parser.add_argument("-h", "--help", action="store_true", help="show this text")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    parser.add_argument(
        "--megabytes", type=at_least(1), default=512, metavar="N", help="memory to read, in MiB (default: 512)"
    )
    parser.add_argument(
        "--repeats", type=at_least(1), default=9, metavar="N", help="of each measurement, the best counts (default: 9)"
    )
    flags = parse_flags(parser, argv)
    if flags.help:
        parser.print_help()
        return EXIT_OK
    from ksana.bench.export import write_json
    from ksana.bench.limits import measure_limits, render_limits
    from ksana.bench.report import print_report

    if flags.json is not None:
        check_writable(flags.json)
    limits = measure_limits(num_bytes=flags.megabytes * 2**20, repeats=flags.repeats)
    print_report(render_limits(limits))
    if flags.json is not None:
        write_json(flags.json, limits.as_dict())
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
