"""``ksana-perf schema``: what may stand in each file, as JSON Schema."""

from __future__ import annotations

import json

from ksana.cli.flags import CommandParser
from ksana.errors import UsageError
from ksana.perf.config import BatchConfig, ModelPerfConfig
from ksana.perf.json_files import JsonPart
from ksana.perf.latency_model import LatencyModel
from ksana.perf.result import PerfResult
from ksana.plugin.messages import nearest

SCHEMAS: dict[str, type[JsonPart]] = {
    "config": ModelPerfConfig,
    "batches": BatchConfig,
    "result": PerfResult,
    "latency": LatencyModel,
}

_HELP = """usage: ksana-perf schema [NAME]

Print the JSON Schema of a file, or of all.

  config    model_perf_config.json: how often, which batches, where the result goes
  batches   batch_config.json: the batches
  result    model_perf_result.json: what was measured
  latency   latency_model.json: what ksana-perf fit makes of it"""


def schema_command(argv: list[str]) -> int:
    """Run ``ksana-perf schema``; returns the exit code."""
    parser = CommandParser()
    parser.add_argument("-h", "--help", action="store_true")
    parser.add_argument("name", nargs="?")
    arguments = parser.parse_args(argv)
    if arguments.help:
        print(_HELP)
        return 0
    if arguments.name is not None and arguments.name not in SCHEMAS:
        hint = nearest(arguments.name, SCHEMAS)
        raise UsageError(f"schema: there is no file {arguments.name!r}{hint}; there are {', '.join(SCHEMAS)}")
    schemas = {name: kind.model_json_schema() for name, kind in SCHEMAS.items()}
    print(json.dumps(schemas[arguments.name] if arguments.name else schemas, indent=2))
    return 0
