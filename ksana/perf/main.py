"""The command ``ksana-perf``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from ksana.cli.flags import CommandLine
from ksana.cli.output_files import check_writable
from ksana.cli.startup import EXIT_OK, prepare_start, run_command
from ksana.config.settings import core_fields
from ksana.errors import UsageError
from ksana.perf.config import BatchConfig, ModelPerfConfig
from ksana.perf.fit_command import fit_command
from ksana.perf.grid_command import grid_command
from ksana.perf.json_files import read_json, write_json
from ksana.perf.schema_command import schema_command
from ksana.stdout import show

_SUBCOMMANDS: dict[str, Callable[[list[str]], int]] = {
    "fit": fit_command,
    "grid": grid_command,
    "schema": schema_command,
}


def _add_flags(group: argparse._ActionsContainer) -> None:
    group.add_argument("--config", metavar="FILE", help="what to measure: model_perf_config.json")
    group.add_argument("--output", metavar="FILE", help="where the result goes, instead of the file's output_file")


def _means_nothing_here(path: tuple[str, ...]) -> bool:
    """No server listens, no step runs beside another or is traced, no prompt waits and no prefix is reused."""
    if path[0] in ("server", "telemetry"):
        return path != ("server", "log_level")
    return path in (
        ("scheduler", "enable_async"),
        ("scheduler", "max_mixed_prefill_tokens"),
        ("scheduler", "long_prefill_token_threshold"),
        ("cache", "enable_prefix_caching"),
    )


COMMAND = CommandLine(
    name="ksana-perf",
    usage="ksana-perf --config FILE --model MODEL [flags]\n"
    "       ksana-perf fit RESULT [--output FILE] [--plot FILE]\n"
    "       ksana-perf grid [flags]\n"
    "       ksana-perf schema [NAME]",
    description="Measure single steps of a model: fixed batches, computed round after round, without a server.",
    epilog="""\
examples:
  ksana-perf grid > batch_config.json                a series of batches worth measuring
  ksana-perf --config model_perf_config.json --model demo
                                                     measure them; the file says how often and where to write
  ksana-perf fit model_perf_result.json --output latency_model.json --plot fit.png
                                                     a formula for the time of any step, and how good it is
  ksana-perf schema config                           what may stand in model_perf_config.json

docs/perf.md explains the files. Settings come from flags, environment and --config-file as with ksana-serve.
""",
    add_flags=_add_flags,
    omitted=frozenset(path for path in core_fields() if _means_nothing_here(path)),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code.

    0: everything was measured and written. 2: the operator has to change something; one line on stderr says what.
    130: Ctrl-C; nothing was written. An unexpected exception keeps its traceback.
    """
    return run_command(COMMAND.name, _run, argv)


def _run(argv: list[str]) -> int:
    if argv[:1] and argv[0] in _SUBCOMMANDS:
        return _SUBCOMMANDS[argv[0]](argv[1:])
    start = prepare_start(argv, COMMAND)
    if start is None:
        return EXIT_OK
    if not start.own_flags.config:
        raise UsageError("no --config given: it names a model_perf_config.json, see docs/perf.md or ksana-perf schema")
    file = Path(start.own_flags.config)
    perf = read_json(file, ModelPerfConfig)
    batch_file = file.parent / perf.batch_config_file
    batches = read_json(batch_file, BatchConfig)
    output = Path(start.own_flags.output or file.parent / perf.output_file)
    check_writable(output)
    # These load torch, which --help and the like start without.
    from ksana.perf.measure import measure
    from ksana.perf.report import RoundProgress, print_result

    with RoundProgress(len(batches.batches) * (perf.warmup_round + perf.stat_round)) as progress:
        result = measure(perf, batches, batch_file, start.config, start.plugins, progress.advance)
    write_json(output, result)
    print_result(result)
    show(f"written to {output}")
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
