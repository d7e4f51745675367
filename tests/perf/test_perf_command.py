"""``ksana-perf`` as an operator meets it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ksana.perf.main import main
from ksana.perf.result import PerfResult

EXAMPLE = Path(__file__).parents[2] / "examples" / "model_perf"

# A backend that counts its projections, and an ear for every address that the process binds.
PLUGIN = """
import sys
from ksana import hookimpl

def hear(event, arguments):
    if event == "socket.bind":
        print("BOUND", arguments[1], file=sys.stderr)

sys.addaudithook(hear)

def create(config):
    from ksana.kernels.base import KernelBackend

    class CountingBackend(KernelBackend):
        name = "counting"
        calls = 0

        def linear(self, x, linear):
            self.calls += 1
            return super().linear(x, linear)

        def operator_seconds(self):
            return {"linear": self.calls / 1000, "never": 0.0}

    return CountingBackend()

@hookimpl
def ksana_kernel_backends(register):
    from ksana.kernels.selection import KernelBackendInfo
    register(KernelBackendInfo("counting", "cpu", priority=99, probe=lambda: None, create=create))
"""


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("KSANA_", "KLLM_"))]:
        monkeypatch.delenv(name)


def write_configs(folder: Path, batches: Any, **config: Any) -> Path:
    (folder / "batches.json").write_text(json.dumps({"batches": batches}))
    file = folder / "perf.json"
    file.write_text(json.dumps({"batch_config_file": "batches.json", "output_file": "out.json", **config}))
    return file


def test_the_example_runs_to_its_end_by_itself(tiny_path: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "counting_plugin.py").write_text(PLUGIN)
    output = tmp_path / "result.json"
    config = str(EXAMPLE / "model_perf_config.json")
    command = [sys.executable, "-m", "ksana.perf.main", "--config", config, "--output", str(output)]
    flags = ["--model", str(tiny_path()), "--threads", "1", "--num-blocks", "300", "-p", "counting_plugin"]
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([*command, *flags], env=environ, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert "BOUND" not in done.stderr
    assert "decode of 8 at 256" in done.stdout
    result = PerfResult.model_validate_json(output.read_text())
    assert [len(batch.rounds) for batch in result.batches] == [10, 10, 10]
    assert result.environment.backend == "counting"
    for batch in result.batches:
        for each in batch.rounds:
            assert set(each.phases_ms) == {"schedule", "prepare", "forward", "logits", "sample", "update"}
            assert all(value >= 0.0 for value in each.phases_ms.values())
            assert sum(each.phases_ms.values()) == pytest.approx(each.step_ms)
            # Three layers of four projections, and the head: the rounds computed nothing else, and nothing less.
            assert each.operators_ms == {"linear": pytest.approx(13.0)}
        assert batch.step_ms.min <= batch.step_ms.p50 <= batch.step_ms.p90 <= batch.step_ms.p99 <= batch.step_ms.max
        assert batch.operators_ms["linear"].mean == pytest.approx(13.0)
    assert list(tmp_path.glob(".result*")) == []


def fails(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(arguments) == 2
    message = capsys.readouterr().err.splitlines()[-1]
    assert message.startswith("ksana-perf: error: ")
    return message


ONE = [{"requests": [{"forwarding_token_num": 4}]}]


def test_a_full_stdout_costs_neither_the_result_nor_a_traceback(tiny_path: Callable[..., Path], tmp_path: Path) -> None:
    config = write_configs(tmp_path, [{"requests": [{"forwarding_token_num": 8}]}], warmup_round=0, stat_round=1)
    command = [sys.executable, "-m", "ksana.perf.main", "--config", str(config), "--model", str(tiny_path())]
    with open("/dev/full", "wb") as full:  # noqa: PTH123
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert "Cannot write to stdout" in done.stderr and "Traceback" not in done.stderr
    assert len(PerfResult.model_validate_json((tmp_path / "out.json").read_text()).batches) == 1


@pytest.mark.parametrize(
    ("requests", "flags", "words"),
    [
        ({"forwarding_token_num": 9}, ["--max-num-batched-tokens", "8"], "9 forwarding tokens, more than a step takes"),
        (
            {"forwarding_token_num": 1, "kv_cached_token_num": 8, "request_num": 5},
            ["--max-num-seqs", "4"],
            "5 requests",
        ),
        ({"forwarding_token_num": 9}, ["--split-fuse-token-num", "8"], "raise --split-fuse-token-num (now 8)"),
        ({"forwarding_token_num": 1, "request_num": 3}, ["--max-waiting-queue-len", "2"], "3 requests without cached"),
    ],
)
def test_a_batch_that_a_step_does_not_take_is_refused_before_the_model_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], requests: Any, flags: list[str], words: str
) -> None:
    file = write_configs(tmp_path, [*ONE, {"name": "big", "requests": [requests]}])
    message = fails(capsys, "--config", str(file), "--model", "/no/such/model", *flags)
    assert f"{tmp_path / 'batches.json'}: batch big has " in message
    assert words in message


def test_a_prompt_beside_decodes_is_not_cut_as_in_a_server(tiny_path: Callable[..., Path], tmp_path: Path) -> None:
    """There it is, so that nobody's text stops for long prompts."""
    decodes = {"forwarding_token_num": 1, "kv_cached_token_num": 8, "request_num": 2}
    mixed = {"requests": [decodes, {"forwarding_token_num": 300}]}
    file = write_configs(tmp_path, [mixed], warmup_round=0, stat_round=1)
    flags = ["--model", str(tiny_path()), "--threads", "1", "--num-blocks", "300"]
    assert main(["--config", str(file), *flags]) == 0
    (batch,) = PerfResult.model_validate_json((tmp_path / "out.json").read_text()).batches
    assert batch.num_forwarding_tokens == 302


@pytest.mark.parametrize(
    ("cached", "count", "words"),
    [
        (511, 1, "a request of 512 tokens, and samples one more; the longest possible request has 512"),
        (100, 9, "needs 72 blocks of the KV cache, which has 70"),
    ],
)
def test_a_batch_that_does_not_fit_the_cache_is_refused_before_anything_runs(
    tmp_path: Path,
    tiny_path: Callable[..., Path],
    capsys: pytest.CaptureFixture[str],
    cached: int,
    count: int,
    words: str,
) -> None:
    big = {"forwarding_token_num": 1, "kv_cached_token_num": cached, "request_num": count}
    file = write_configs(tmp_path, [*ONE, {"requests": [big]}])
    flags = ["--model", str(tiny_path()), "--threads", "1", "--num-blocks", "70"]
    assert words in fails(capsys, "--config", str(file), *flags)
    assert not (tmp_path / "out.json").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "demo"], "no --config given"),
        (["--config", "x.json"], "no model given"),
        (["--config", "absent.json", "--model", "demo"], "cannot read absent.json"),
        (["--model", "demo", "--port", "1"], "unknown flag --port"),
        (["schema", "bathces"], "did you mean batches?"),
        (["fit"], "no result given"),
        (["grid", "--max-tokens", "0"], "--max-tokens: '0' is not valid: must be an integer of at least 1"),
    ],
)
def test_mistakes_are_explained(capsys: pytest.CaptureFixture[str], arguments: list[str], words: str) -> None:
    assert words in fails(capsys, *arguments)


def test_an_output_that_cannot_be_written_is_found_out_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_configs(tmp_path, ONE, output_file="no/such/folder/out.json")
    message = fails(capsys, "--config", str(file), "--model", "/no/such/model")
    assert f"there is no folder {tmp_path / 'no/such/folder'}" in message


@pytest.mark.parametrize("arguments", [["--help"], ["schema"], ["grid"], ["fit", "--help"]])
def test_questions_are_answered_without_a_heavy_library(arguments: list[str]) -> None:
    code = (
        "import sys; from ksana.perf.main import main; status = main(sys.argv[1:]); "
        "print('LOADED', status, sorted({'torch', 'transformers', 'aiohttp', 'matplotlib'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "LOADED 0 []"
