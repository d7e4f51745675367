"""The comparison of engines: its arithmetic, and what it does with engines that misbehave."""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from cpu_peers import process as processes
from cpu_peers.client import stream_all
from cpu_peers.engines import DRIVERS, ENGINES, MODEL_NAME, VARIANTS, Engine, Machinery
from cpu_peers.errors import EngineFailed
from cpu_peers.model_files import ModelFiles, ModelShape
from cpu_peers.process import DriverProcess, ServerProcess
from cpu_peers.report import BEGIN, HEADINGS, Run, as_json, as_markdown, replace_block, table
from cpu_peers.results import Limits, Results
from cpu_peers.runner import Runner
from cpu_peers.scenarios import SCENARIOS
from cpu_peers.targets import ROWS, Context, OfBestPeer, OfVariant, decode_bound, is_met, prefill_bound
from cpu_peers.venvs import ensure_installed

from ksana.testing import tiny_model
from ksana.testing.waiting import wait_until

LIMITS = Limits("native", 32e9, 420e9, 190e9)
SHAPE = ModelShape(134_515_008, 106_202_880, 30, 576, 23_040)
RUN = Run("2026-01-01", "a machine", 2, 3, "peer==1")

ECHO = """
def load(settings):
    print("the engine talks on stdout")
    return lambda prompts, tokens: [[prompt[0]] * tokens for prompt in prompts]
"""


@pytest.fixture
def start_driver(tmp_path: Path) -> Iterator[Callable[[str], DriverProcess]]:
    """Starts a driver whose ``load`` is given as source."""
    started: list[DriverProcess] = []

    def start(source: str) -> DriverProcess:
        script = tmp_path / "driver.py"
        script.write_text(f"from protocol import serve\n{textwrap.dedent(source)}\nserve(load)\n")
        environment = {**os.environ, "PYTHONPATH": str(DRIVERS)}
        started.append(DriverProcess([sys.executable, str(script), "{}"], environment, tmp_path / "log"))
        return started[-1]

    yield start
    for process in started:
        process.close()


@pytest.fixture(scope="module")
def machinery(tmp_path_factory: pytest.TempPathFactory) -> Machinery:
    """With a tiny model instead of the demo model, and no peer installed."""
    folder = tmp_path_factory.mktemp("compare")
    model = tiny_model(folder / "model")
    none = folder / "none.gguf"
    return Machinery(folder / "venvs", ModelFiles(model, none, none, none), 1, folder)


def context_of(**figures: dict[str, list[float]]) -> Context:
    """Rates of one scenario's variants."""
    results = Results(scenarios=list(figures), limits=LIMITS)
    for scenario, variants in figures.items():
        for variant, rates in variants.items():
            for rate in rates:
                results.add(scenario, variant, {"rate": rate})
    return Context(results, SHAPE)


def test_the_bounds_are_those_computed_by_hand() -> None:
    assert decode_bound(1, 0)(LIMITS, SHAPE) == pytest.approx(32e9 / 269.03e6, rel=1e-3)  # reading the weights
    assert decode_bound(32, 192)(LIMITS, SHAPE) == pytest.approx(420e9 / 269.03e6, rel=1e-3)  # multiplying
    assert decode_bound(1, 0, 0.5)(LIMITS, SHAPE) == pytest.approx(4 * 32e9 / 269.03e6, rel=1e-3)
    assert prefill_bound(1024)(LIMITS, SHAPE) == pytest.approx(420e9 / (212.4e6 + 35.4e6), rel=1e-2)


def test_a_time_is_met_from_below_and_a_rate_from_above() -> None:
    rate = next(row for row in ROWS if row.title == "decode, 8 streams")
    context = context_of(decode_8={"ksana": [100.0, 141.0, 500.0], "vllm": [100.0], "transformers": [90.0]})
    assert is_met(OfBestPeer(1.4), rate, context) is True
    assert is_met(OfBestPeer(1.42), rate, context) is False
    wait = next(row for row in ROWS if row.metric == "ttft_p50")
    context.results.add("server_32", "ksana_server", {"ttft_p50": 0.5})
    context.results.add("server_32", "vllm_server", {"ttft_p50": 0.9})
    assert is_met(OfVariant(0.6, "vllm_server", "vLLM's"), wait, context) is True
    assert is_met(OfVariant(0.5, "vllm_server", "vLLM's"), wait, context) is False


def test_a_target_whose_peer_failed_is_neither_met_nor_missed() -> None:
    context = context_of(decode_1={"ksana": [50.0], "vllm": [40.0]})
    cells = dict(zip(HEADINGS, table(context)[0], strict=True))
    assert cells["best peer"] == "40.0 vLLM" and cells["ratio"] == "1.25"
    assert cells["must"].startswith("unknown: 0.95 x llama.cpp")
    assert cells["aim"].startswith("missed: 0.95 x bound")


def test_every_row_names_a_scenario_and_variants_that_exist() -> None:
    for row in ROWS:
        referred = {target.variant for target in (*row.must, *row.aim) if isinstance(target, OfVariant)}
        assert {row.variant, *referred} <= set(SCENARIOS[row.scenario].variants), row.title
    assert {variant.engine for variant in VARIANTS.values()} == set(ENGINES)


def test_a_page_holds_one_block_however_often_it_is_written(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Before\n")
    context = context_of(decode_1={"ksana": [50.0], "vllm": [40.0]})
    for _ in range(2):
        replace_block(page, as_markdown(context, RUN, "picture.png"))
    page.write_text(page.read_text() + "\n# After\n")
    replace_block(page, as_markdown(context, RUN, "picture.png"))
    text = page.read_text()
    assert text.count(BEGIN) == 1 and text.startswith("# Before\n") and text.endswith("\n# After\n")


def test_a_driver_answers_in_spite_of_an_engine_that_prints(start_driver: Callable[[str], DriverProcess]) -> None:
    process = start_driver(ECHO)
    seconds, outputs = process.generate([[5, 6], [7]], 3)
    assert outputs == [[5, 5, 5], [7, 7, 7]] and seconds >= 0 and process.start_seconds > 0


def test_a_paused_engine_and_its_children_stand_still(start_driver: Callable[[str], DriverProcess]) -> None:
    process = start_driver("import subprocess\nsubprocess.Popen(['sleep', '60'])\n" + ECHO)
    root = next(child for child in psutil.Process().children() if "driver.py" in " ".join(child.cmdline()))
    process.pause()
    wait_until(lambda: {root.status(), *(child.status() for child in root.children())} == {psutil.STATUS_STOPPED})
    process.resume()
    assert process.generate([[1]], 1)[1] == [[1]]
    children = root.children()
    assert children
    process.close()
    wait_until(lambda: all(map(has_ended, children)))  # a signal takes its time


def has_ended(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE  # nobody may be there to bury it
    except psutil.NoSuchProcess:
        return True


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("def load(settings):\n    raise ValueError('no such model')\n", "did not start: ValueError: no such model"),
        ("import os\ndef load(settings):\n    os._exit(3)\n", "did not start"),
    ],
)
def test_an_engine_that_does_not_start_says_why(
    start_driver: Callable[[str], DriverProcess], source: str, reason: str
) -> None:
    with pytest.raises(EngineFailed, match=reason):
        start_driver(source)


def test_an_engine_that_hangs_is_ended_at_its_deadline(
    start_driver: Callable[[str], DriverProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = "import time\ndef load(settings):\n    return lambda p, n: [[1]] if len(p[0]) == 4 else time.sleep(60)\n"
    process = start_driver(source)
    monkeypatch.setattr(processes, "ANSWER_DEADLINE_S", 0.2)
    with pytest.raises(EngineFailed, match="failed within 0 s"):
        process.generate([[1]], 1)
    with pytest.raises(EngineFailed, match="has ended"):
        process.generate([[1]], 1)


def test_an_engine_that_stops_early_is_not_measured(start_driver: Callable[[str], DriverProcess]) -> None:
    process = start_driver("def load(settings):\n    return lambda prompts, tokens: [[1] for _ in prompts]\n")
    with pytest.raises(EngineFailed, match="instead of 8 each"):
        process.generate([[1]], 8)


def test_ksanas_driver_generates_as_many_tokens_as_asked(machinery: Machinery) -> None:
    process = VARIANTS["ksana"].start(machinery, VARIANTS["ksana"])
    try:
        assert isinstance(process, DriverProcess)
        _, outputs = process.generate([[5, 6, 7], [8, 9, 10]], 4)
        assert [len(output) for output in outputs] == [4, 4]
        assert process.resident_bytes() > 0
    finally:
        process.close()


def test_ksanas_server_is_started_and_streams(machinery: Machinery) -> None:
    process = VARIANTS["ksana_server"].start(machinery, VARIANTS["ksana_server"])
    try:
        assert isinstance(process, ServerProcess)
        answers = stream_all(process.url, MODEL_NAME, [[5, 6, 7], [8, 9, 10]], 4)
        assert all(answer.output_tokens == 4 and answer.chunk_times[0] > answer.sent_s for answer in answers)
        with pytest.raises(EngineFailed, match="HTTP 400"):
            stream_all(process.url, MODEL_NAME, [[10**6]], 4)
    finally:
        process.close()


def test_a_peer_that_is_missing_is_reported_and_the_others_go_on(machinery: Machinery) -> None:
    runner = Runner(machinery, ["vllm", "openvino"], 1, lambda text: None)
    runner.run(["decode_1", "server_32", "start"])
    assert {"vllm", "vllm_server", "openvino"} <= set(runner.results.failures)
    assert "cannot be started" in runner.results.failures["vllm"]
    report = as_json(Context(runner.results, SHAPE), RUN)
    assert "cannot be started" in report and "not measured" in report


def test_a_peer_that_cannot_be_installed_is_no_peer(tmp_path: Path) -> None:
    engine = Engine("broken", "Broken", ("/no/such/package",))
    with pytest.raises(EngineFailed, match=r"cannot be installed: ERROR: .*/no/such/package"):
        ensure_installed(engine, tmp_path / "venv", tmp_path / "log")
    assert not (tmp_path / "venv" / "installed.txt").exists()
