"""The command line of ``ksana-bench``."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ksana.bench.command import main
from ksana.bench.flag_options import make_options
from ksana.bench.flags import bench_parser, parse_flags
from ksana.bench.options import BenchOptions, LengthRange
from ksana.cli.flags import normalize


def options(*words: str) -> BenchOptions:
    return make_options(parse_flags(bench_parser(), normalize(words)))


def test_help_loads_no_heavy_library() -> None:
    code = (
        "import sys; from ksana.bench.command import main; status = main(['--help']); "
        "print('LOADED', status, sorted({'torch', 'transformers', 'aiohttp', 'matplotlib'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.stdout.splitlines()[-1] == "LOADED 0 []", result.stderr


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--num-request", "3"], "unknown flag --num-request; did you mean --num-requests"),
        (["serve"], "unexpected argument 'serve'"),
        (["--port", "x"], "--port: 'x' is not a port"),
        (["--port", "1,2", "--host", "a,b,c"], "--host has 3 and --port 2"),
        (["--base-url", "localhost:1"], "must begin with http://"),
        (["--input-len", "9:3"], "the smaller number comes first"),
        (["--input-len", "0"], "'0' is not valid: must be an integer of at least 1"),
        (["--request-rate", "0"], "must be more than 0"),
        (["--request-rate", "nan"], "must be more than 0"),
        (["--percentiles", "50,200"], "between 0 and 100"),
        (["--bound-statistic", "median"], "neither 'mean' nor a percentile"),
        (["--extra-body", "[1]"], "must be a JSON object"),
        (["--header", "x"], "not of the form"),
        (["--trace", "a", "--prompts", "b"], "two workloads"),
        (["--trace", "a", "--request-rate", "2"], "its own arrival times"),
        (["--num-rates", "3"], "needs a --request-rate"),
        (["--json", "/no/such/folder/x.json"], "there is no folder"),
        (["--plot", "x.bmp"], "must end in .png"),
        (["--diff-check", "no.csv"], "cannot read no.csv: No such file"),
        (["diff", "a.csv"], "two files"),
        (["diff", "a.csv", "b.csv"], "cannot read a.csv"),
        (["limits", "--megabytes", "0"], "'0' is not valid: must be an integer of at least 1"),
    ],
)
def test_a_wrong_command_line_is_one_line(capsys: pytest.CaptureFixture[str], flags: list[str], message: str) -> None:
    assert main(flags) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.startswith("ksana-bench: error: ") and captured.err.count("\n") == 1
    assert captured.out == ""


def test_names_of_the_original_are_understood() -> None:
    words = "--dataset_path a.csv --prompt_num 7 --max_new_tokens 9 --random --request_rate 2.5 --topk 3 --topp 0.5"
    more = "--repeat_num_iters 2 --warmup_num_iters 1 --request_rate_num_iters 4 --max_first_token_latency 1.5"
    made = options(*words.split(), *more.split(), "--perf_csv", "p.csv", "--stop_strings", "a", "b")
    assert made.workload.prompts == Path("a.csv")
    assert (made.workload.num_requests, made.workload.output_len) == (7, LengthRange(9, 9))
    assert (made.arrival.poisson, made.arrival.rate) == (True, 2.5)
    assert (made.sampling.top_k, made.sampling.top_p, made.sampling.stop) == (3, 0.5, ("a", "b"))
    assert (made.repeat.num_repeats, made.repeat.num_warmups, made.repeat.num_rates) == (2, 1, 4)
    assert made.repeat.is_search
    assert options("--prompt-num", "0").workload.num_requests is None


def test_servers_and_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    assert options("--port", "1,2").server.urls == ("http://127.0.0.1:1", "http://127.0.0.1:2")
    assert options("--host", "::1").server.urls == ("http://[::1]:8080",)
    assert options("--base-url", "https://a/v1/,http://b").server.urls == ("https://a", "http://b")
    assert options().server.headers == {}
    monkeypatch.setenv("OPENAI_API_KEY", "one")
    assert options().server.headers == {"Authorization": "Bearer one"}
    assert options("--api-key", "two", "--header", "X-A: b: c").server.headers == {
        "Authorization": "Bearer two",
        "X-A": "b: c",
    }


def test_a_picture_needs_matplotlib(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["--plot", "x.png"]) == 2
    assert "pip install matplotlib" in capsys.readouterr().err


@pytest.mark.parametrize("native", [True, False])
def test_limits(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, native: bool
) -> None:
    from ksana.bench import limits
    from ksana.kernels.cpu.library import load_library

    if native and load_library() is None:
        pytest.skip("no native kernels")
    if not native:
        monkeypatch.setattr(limits, "load_library", lambda: None)
    file = tmp_path / "limits.json"
    assert main(["limits", "--megabytes", "8", "--repeats", "1", "--json", str(file)]) == 0
    document = json.loads(file.read_text())
    assert document["method"] == ("native" if native else "torch")
    assert document["results"][0]["threads"] == 1
    # A machine that reads less than 100 MB/s or computes less than 100 MFLOP/s is one where the unit is wrong.
    for result in document["results"]:
        assert min(result["read_bandwidth"], *result["gemm"].values()) > 1e8
    assert ("measured with torch" in capsys.readouterr().out) is not native
