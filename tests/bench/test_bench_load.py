"""``ksana-bench`` against a real server."""

from __future__ import annotations

import csv
import itertools
import json
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize(
    ("api", "counted_by"), [("completions", "usage"), ("chat", "usage"), ("generate", "ids"), ("auto", "usage")]
)
def test_every_token_is_counted(real_url: str, bench: Any, api: str, counted_by: str) -> None:
    assert bench(real_url, "--api", api, "--num-requests", 6, "--input-len", 20, "--output-len", 12) == 0, bench.stderr
    run = bench.run
    assert run["requests"] == {"planned": 6, "completed": 6, "failed": 0, "interrupted": 0}
    assert run["tokens"]["output"] == 6 * 12
    assert run["tokens"]["counted_by"] == {counted_by: 6}
    if api == "chat":  # words and not ids, and a template around them
        assert run["tokens"]["input"] > 6 * 20
    else:
        assert run["tokens"]["input"] == 6 * 20
    assert run["finish_reasons"] == {"length": 6}
    assert bench.document["server"]["api"] == ("completions" if api == "auto" else api)


def test_times_of_a_request_add_up(real_url: str, bench: Any) -> None:
    assert bench(real_url, "--api", "generate", "--num-requests", 3, "--output-len", 10, "--concurrency", 1) == 0
    run = bench.run
    for record in run["records"]:
        assert record["sent_ms"] < record["chunks_ms"][0] <= record["chunks_ms"][-1] <= record["end_ms"]
    first = min(record["chunks_ms"][0] - record["sent_ms"] for record in run["records"])
    assert run["ttft_ms"]["min"] == pytest.approx(first)
    gaps = [later - sooner for it in run["records"] for sooner, later in itertools.pairwise(it["chunks_ms"])]
    assert run["itl_ms"]["max"] == pytest.approx(max(gaps))
    tpots = [(it["end_ms"] - it["chunks_ms"][0]) / 9 for it in run["records"]]
    assert run["tpot_ms"]["mean"] == pytest.approx(sum(tpots) / 3)
    assert run["throughput"]["output_tokens_per_s"] == pytest.approx(30 / run["duration_s"])


def test_a_server_of_the_native_api_alone_is_recognised(native_url: str, bench: Any) -> None:
    assert bench(native_url, "--num-requests", 2, "--output-len", 3) == 0
    assert bench.document["server"]["api"] == "generate"
    assert bench(native_url, "--num-requests", 2, "--api", "chat") == 2
    assert "--model" in bench.stderr


def test_whole_answers_have_a_latency_only(real_url: str, bench: Any) -> None:
    for api in ("completions", "chat", "generate"):
        assert bench(real_url, "--no-stream", "--api", api, "--num-requests", 2, "--output-len", 5) == 0
        run = bench.run
        assert (run["ttft_ms"]["mean"], run["itl_ms"]["mean"], run["tpot_ms"]["mean"]) == (None, None, None)
        assert run["latency_ms"]["mean"] > 0
        assert run["tokens"]["output"] == 10
        assert "not streamed" in bench.stdout


def test_no_more_in_flight_than_asked_for(real_url: str, bench: Any) -> None:
    assert bench(real_url, "--concurrency", 3, "--num-requests", 12, "--output-len", 8) == 0
    spans = [(record["sent_ms"], record["end_ms"]) for record in bench.run["records"]]
    most = max(sum(start <= moment < end for start, end in spans) for moment, _ in spans)
    assert most == 3


def test_lengths_are_drawn_from_their_ranges(real_url: str, bench: Any) -> None:
    assert bench(real_url, "--num-requests", 20, "--input-len", "5:40", "--output-len", "1:6") == 0
    records = bench.run["records"]
    inputs, outputs = {it["input_tokens"] for it in records}, {it["output_tokens"] for it in records}
    assert len(inputs) > 5 and min(inputs) >= 5 and max(inputs) <= 40
    assert outputs == {1, 2, 3, 4, 5, 6}


def test_a_shared_prefix_is_found_in_the_cache_and_other_runs_are_not(real_url: str, bench: Any) -> None:
    shape = ["--num-requests", 4, "--input-len", 64, "--output-len", 2, "--concurrency", 1, "--seed", 5]
    assert bench(real_url, *shape, "--warmups", 1) == 0
    assert bench.run["tokens"]["cached"] == 0
    assert bench(real_url, *shape, "--shared-prefix-len", 48, "--warmups", 1) == 0
    assert bench.run["tokens"]["cached"] == 4 * 48


def test_answers_are_stored_and_compared(real_url: str, bench: Any, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.csv"
    with prompts.open("w", newline="") as file:
        csv.writer(file).writerows([["id", "text"], ["1", "The quick, brown\nfox"], ["2", "What is the capital"]])
    stored, report = tmp_path / "answers.csv", tmp_path / "diff.txt"
    flags = ["--prompts", prompts, "--col-idx", "text", "--output-len", 30]
    assert bench(real_url, *flags, "--output-csv", stored) == 0
    answers = [row[0] for row in csv.reader(stored.open(newline=""))]
    assert len(answers) == 2 and all(answers)
    assert bench(real_url, *flags, "--diff-check", stored) == 0
    assert "2 of 2 answers equal" in bench.stdout
    with stored.open("w", newline="") as file:
        csv.writer(file).writerows([[answers[0]], ["something else"]])
    assert bench(real_url, *flags, "--diff-check", stored, "--diff-output", report) == 1
    assert "1 of 2 answers equal, 1 suspicious" in bench.stdout
    assert "'something else'" in report.read_text()


def test_json_lines_of_every_kind(real_url: str, bench: Any, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    lines = [{"prompt": "Hello"}, {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}]
    file.write_text("\n".join(map(json.dumps, lines)))
    assert bench(real_url, "--prompts", file, "--output-len", 7, "--ignore-eos") == 0
    assert bench.document["server"]["api"] == "chat"
    assert [record["output_tokens"] for record in bench.run["records"]] == [7, 3]
    file.write_text(json.dumps({"input_tokens": [20, 21, 22]}))
    assert bench(real_url, "--prompts", file, "--output-len", 7, "--num-requests", 2, "--ignore-eos") == 0
    assert [record["input_tokens"] for record in bench.run["records"]] == [3, 3]
    assert bench(real_url, "--prompts", file, "--api", "chat") == 2
    assert "--api completions" in bench.stderr


def test_a_trace_is_replayed_with_its_times_and_its_sharing(real_url: str, bench: Any, tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": 5000, "input_length": 1100, "output_length": 40, "hash_ids": [1, 2, 3]},
        {"timestamp": 6000, "input_length": 1400, "output_length": 20, "hash_ids": [1, 2, 9]},
        {"timestamp": 6000, "input_length": 600, "output_length": 20, "hash_ids": [7, 8]},
        {"timestamp": 99000, "input_length": 600, "output_length": 20, "hash_ids": [7, 8]},
    ]
    file.write_text("\n".join(map(json.dumps, lines)))
    # 1420 tokens at most become 512, the model's context: blocks of 512 become such of 184.
    assert bench(real_url, "--trace", file, "--speedup", 2, "--trace-duration", 10) == 0
    records = bench.run["records"]
    assert bench.document["workload"]["scale"] == pytest.approx(184 / 512)
    assert [record["input_tokens"] for record in records] == [1100 * 184 // 512, 1400 * 184 // 512, 600 * 184 // 512]
    assert [record["output_tokens"] for record in records] == [40 * 184 // 512, 7, 7]
    assert records[1]["sent_ms"] - records[0]["sent_ms"] >= 499
    assert records[1]["cached_tokens"] == 2 * 184 // 16 * 16
    assert [records[0]["cached_tokens"], records[2]["cached_tokens"]] == [0, 0]


def test_the_original_columns(real_url: str, bench: Any, tmp_path: Path) -> None:
    file = tmp_path / "perf.csv"
    flags = ["--num-requests", 4, "--output-len", 5, "--percentiles", "90,99.9", "--csv", file]
    assert bench(real_url, *flags, "--request-rate", 100, "--num-rates", 2, "--rate-step", 50, "--repeats", 2) == 0
    rows = list(csv.DictReader(file.open(newline="")))
    assert list(rows[0]) == [
        *("Request rate", "Concurrency", "Total latency", "Request throughput", "Avg latency", "Avg input chars"),
        *("Avg output chars", "Avg input tokens", "Avg output tokens", "Token throughput"),
        *("P90 latency", "P99.9 latency"),
        *("Avg TTFT", "Median TTFT", "P90 TTFT", "P99.9 TTFT"),
        *("Avg ITL", "Median ITL", "P90 ITL", "P99.9 ITL"),
        *("Avg TPOT", "Median TPOT", "P90 TPOT", "P99.9 TPOT"),
    ]
    assert [row["Request rate"] for row in rows] == ["100.0", "100.0", "150.0", "150.0"]
    assert {(row["Avg input tokens"], row["Avg output tokens"]) for row in rows} == {("128.0", "5.0")}


def test_a_search_says_which_rate_keeps_the_bounds(real_url: str, bench: Any) -> None:
    flags = ["--num-requests", 3, "--input-len", 10, "--output-len", 2]
    assert bench(real_url, *flags, "--max-ttft", 60, "--request-rate", 50) == 0
    assert "use more requests" in bench.stdout
    assert bench.document["rate_search"]["highest_rate"] >= 50
    assert bench(real_url, *flags, "--max-ttft", 1e-9, "--request-rate", 50, "--num-rates", 2) == 0
    assert bench.document["rate_search"]["kept"] == {"25": False, "50": False}
    assert "none of those tried" in bench.stdout


def test_requests_that_the_model_cannot_take(real_url: str, bench: Any) -> None:
    assert bench(real_url, "--input-len", 500, "--output-len", 20) == 2
    assert "do not fit the model's 512" in bench.stderr
    assert bench(real_url, "--token-range", "600:700", "--num-requests", 3) == 1
    assert bench.run["errors"]["HTTP 400"]["count"] == 3
    assert "3 failed: HTTP 400" in bench.stdout


def test_a_picture(real_url: str, bench: Any, tmp_path: Path) -> None:
    flags = ["--num-requests", 3, "--output-len", 4, "--request-rate", 100, "--num-rates", 2]
    assert bench(real_url, *flags, "--plot", tmp_path / "run.png") == 0
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")
    assert bench(real_url, "--num-requests", 2, "--no-stream", "--plot", tmp_path / "run.svg") == 0
    assert "<svg" in (tmp_path / "run.svg").read_text()
