"""``ksana-perf fit``: a latency model out of a result."""

from __future__ import annotations

import argparse
from pathlib import Path

from ksana.cli.flags import CommandParser
from ksana.cli.output_files import check_can_plot, check_writable
from ksana.errors import UsageError
from ksana.perf.fitting import Fit, fit_latency_model
from ksana.perf.json_files import read_json
from ksana.perf.plotting import plot_fit
from ksana.perf.result import PerfResult


def fit_command(argv: list[str]) -> int:
    """Run ``ksana-perf fit``; returns the exit code."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    if arguments.help:
        parser.print_help()
        return 0
    if arguments.result is None:
        raise UsageError("fit: no result given; it is the file that ksana-perf --config has written")
    output = Path(arguments.output) if arguments.output else None
    plot = Path(arguments.plot) if arguments.plot else None
    for file in filter(None, (output, plot)):
        check_writable(file)
    if plot is not None:
        check_can_plot()
    fit = fit_latency_model(read_json(Path(arguments.result), PerfResult), arguments.folds)
    if plot is not None:
        plot_fit(fit, plot)
    if output is not None:
        fit.model.save(output)
    _print_fit(fit)
    return 0


def _print_fit(fit: Fit) -> None:
    quality, held_out = fit.model.quality, fit.model.quality.held_out
    print("seconds a step =")
    for name, seconds in fit.model.seconds.items():
        print(f"  {seconds:11.4e} x {name}")
    print(f"fitted to {quality.num_batches} batches: R2 {quality.r2:.4f}")
    print(
        f"held out, {held_out.folds} folds: R2 {held_out.r2:.4f}, error {held_out.mean_error:.1%} in the mean, "
        f"{held_out.median_error:.1%} in the median, {held_out.max_error:.1%} at most"
    )


def _parser() -> CommandParser:
    parser = CommandParser(
        prog="ksana-perf fit",
        usage="ksana-perf fit RESULT [--output FILE] [--plot FILE] [--folds N]",
        description="Fit a latency model to a result: the seconds of a step as a sum over what is in it.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("-h", "--help", action="store_true", help="show this text")
    parser.add_argument("result", metavar="RESULT", nargs="?", help="model_perf_result.json")
    parser.add_argument("--output", metavar="FILE", help="write the model, for ksana.perf.LatencyModel.load")
    parser.add_argument("--plot", metavar="FILE", help="draw predicted against measured times (needs ksana[plot])")
    parser.add_argument(
        "--folds", metavar="N", type=int, default=5, help="parts, each held out once (default: %(default)s)"
    )
    return parser
