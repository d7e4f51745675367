"""Ksana beside its peers on the CPU, all in one run: llama.cpp, OpenVINO GenAI, vLLM and transformers.

    python benchmarks/compare_cpu.py                       # everything; about a quarter of an hour, installs aside
    python benchmarks/compare_cpu.py --only decode_1,decode_8 --engines ksana,vllm --rounds 1
    python benchmarks/compare_cpu.py --document            # and write the figures into docs/

Each peer is installed, with pinned versions, into an environment of its own, once. All engines get the same weights
(the demo model in bfloat16, but for the int4 row), threads and prompts of random tokens; decoding is greedy,
end-of-sequence ignored, prefix caching off but where it is the subject. The engines of a group of scenarios stay loaded
and take turns, all but one stopped by a signal, so that a slower minute of the machine meets them all. A peer that
cannot be installed, or fails, is reported with its reason, and the others go on.

The wheel of vLLM needs the CPU build of torch: if pip does not find it, name PyTorch's index in PIP_EXTRA_INDEX_URL.
llama.cpp is built from source, for this processor: it needs a C++ compiler.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Callable, Collection
from pathlib import Path

from cpu_peers.engines import ENGINES, Machinery
from cpu_peers.model_files import ModelShape, prepare_model
from cpu_peers.picture import draw
from cpu_peers.report import Run, as_json, as_markdown, print_report, replace_block
from cpu_peers.runner import Runner
from cpu_peers.scenarios import SCENARIOS
from cpu_peers.targets import Context
from rich.console import Console

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "benchmarks.md"
PICTURE = ROOT / "docs" / "benchmark_cpu.png"


def main() -> int:
    arguments = parse()
    if arguments.list:
        print_list()
        return 0
    # Ended from outside, it ends the engines too: some of them are stopped, and would stay for ever.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    started = time.monotonic()

    def say(text: str) -> None:
        print(f"{time.monotonic() - started:6.0f} s  {text}", file=sys.stderr, flush=True)

    output: Path = arguments.output or arguments.venvs / "results"
    output.mkdir(parents=True, exist_ok=True)
    machinery = Machinery(arguments.venvs, prepare_model(arguments.venvs / "model"), arguments.threads, output)
    runner = Runner(machinery, arguments.engines, arguments.rounds, say)
    runner.install()
    runner.measure_limits()
    runner.run(arguments.only)
    context = Context(runner.results, ModelShape.read(machinery.files.folder))
    run = Run.now(arguments.threads, arguments.rounds)
    print_report(context, Console(width=None if sys.stdout.isatty() else 200))
    (output / "compare_cpu.json").write_text(as_json(context, run))
    picture = PICTURE if arguments.document else output / PICTURE.name
    draw(context, run, picture)
    if arguments.document:
        replace_block(PAGE, as_markdown(context, run, PICTURE.name))
    say(f"done; figures in {output / 'compare_cpu.json'}, picture in {picture}")
    return 1 if any(name.startswith("ksana") for name in runner.results.failures) else 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=positive, default=3, metavar="N", help="rounds of each scenario (default: 3)")
    parser.add_argument("--threads", type=positive, default=2, metavar="N", help="threads of each engine (default: 2)")
    parser.add_argument("--only", type=names_of("scenario", SCENARIOS), default=list(SCENARIOS), metavar="SCENARIO,...")
    parser.add_argument("--engines", type=names_of("engine", ENGINES), default=list(ENGINES), metavar="ENGINE,...")
    parser.add_argument(
        "--venvs", type=Path, default=ROOT / ".bench", metavar="DIR", help="environments and model files"
    )
    parser.add_argument("--output", type=Path, metavar="DIR", help="results and logs (default: DIR of --venvs/results)")
    parser.add_argument("--document", action="store_true", help="write table and picture into docs/")
    parser.add_argument("--list", action="store_true", help="list scenarios and engines and stop")
    return parser.parse_args()


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return int(text)


def names_of(kind: str, known: Collection[str]) -> Callable[[str], list[str]]:
    """A parser of ``a,b`` into a list of known names."""

    def parse_names(text: str) -> list[str]:
        names = [name.strip() for name in text.split(",")]
        if unknown := [name for name in names if name not in known]:
            listed = ", ".join(map(repr, unknown))
            raise argparse.ArgumentTypeError(f"unknown {kind} {listed}; known: {', '.join(known)}")
        return names

    return parse_names


def print_list() -> None:
    for scenario in SCENARIOS.values():
        print(f"scenario  {scenario.name:<16} {scenario.title}")
    for engine in ENGINES.values():
        print(f"engine    {engine.name:<16} {engine.title} {' '.join(engine.requirements)}")


if __name__ == "__main__":
    sys.exit(main())
