"""The parts of the load generator that need no server."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ksana.bench.answers import Frames, NulFrames, SseFrames
from ksana.bench.arrivals import send_offsets
from ksana.bench.diff import compare, compare_texts, levenshtein_ratio, rouge_w
from ksana.bench.options import ArrivalOptions, DiffOptions, LengthRange, WorkloadOptions
from ksana.bench.prompt_files import read_prompts
from ksana.bench.rate_search import RatePlan, RateSearch, RateSweep
from ksana.bench.trace import TraceLine, TraceWorkload, read_trace
from ksana.bench.workload import ListWorkload, RandomWorkload
from ksana.errors import UsageError

AT_ONCE = ArrivalOptions()
TEXTS = [b'{"a": 1}', b'{"text": "\\n\\u0000 data: "}', "{'ü': '\u3000'}".encode()]


@given(st.lists(st.sampled_from(TEXTS), max_size=6), st.lists(st.integers(0, 300), max_size=10), st.data())
def test_frames_do_not_depend_on_where_the_network_cuts(
    texts: list[bytes], cuts: list[int], data: st.DataObject
) -> None:
    line_end = data.draw(st.sampled_from([b"\n", b"\r\n"]))
    encodings: list[tuple[Frames, bytes]] = [
        (SseFrames(), b"".join(b": ping" + line_end + b"data: " + it + 2 * line_end for it in texts)),
        (NulFrames(), b"".join(it + b"\0" for it in texts)),
    ]
    for frames, body in encodings:
        bounds = sorted({0, len(body), *(cut for cut in cuts if cut < len(body))})
        pieces = [body[start:end] for start, end in itertools.pairwise(bounds)]
        assert [it for piece in pieces for it in frames.split(piece)] == texts
        assert frames.finish() == b""


def test_a_last_frame_without_an_end_is_not_lost() -> None:
    for frames, body in ((SseFrames(), b"data: [DONE]"), (NulFrames(), b"[DONE]")):
        assert list(frames.split(body)) == []
        assert frames.finish() == b"[DONE]"


def test_offsets() -> None:
    assert send_offsets(3, AT_ONCE, seed=0) == [0, 0, 0]
    assert send_offsets(5, ArrivalOptions(rate=4), seed=0) == [0, 0.25, 0.5, 0.75, 1.0]
    assert send_offsets(5, ArrivalOptions(rate=4, burst=2), seed=0) == [0, 0, 0.5, 0.5, 1.0]
    poisson = send_offsets(20_000, ArrivalOptions(rate=4, burst=2, poisson=True), seed=0)
    assert poisson == sorted(poisson)
    assert poisson[0] == poisson[1] == 0
    assert 20_000 / poisson[-1] == pytest.approx(4, rel=0.05)
    gaps = [later - sooner for sooner, later in zip(poisson[::2], poisson[2::2], strict=False)]
    # Exponential gaps spread as much as they last.
    assert math.sqrt(sum((gap - 0.5) ** 2 for gap in gaps) / len(gaps)) == pytest.approx(0.5, rel=0.1)


def explore(plan: RatePlan, capacity: float) -> list[float]:
    tried = []
    while (rate := plan.next_rate()) is not None:
        tried.append(rate)
        plan.record(rate, kept_bounds=rate <= capacity)
    return tried


@given(st.floats(0.1, 500), st.floats(0.1, 100))
def test_a_search_finds_the_highest_rate_to_a_tenth(capacity: float, start: float) -> None:
    plan = RateSearch(start, 100)
    explore(plan, capacity)
    assert plan.best is None or plan.best <= capacity
    assert capacity - (plan.best or 0) <= 0.2


def test_searches_and_sweeps_end() -> None:
    assert explore(RateSearch(1, 12), 5.6) == [1, 2, 4, 8, 6, 5, 5.5, 5.8, 5.7, 5.6]
    assert explore(RateSearch(1, 4), 1000) == [1, 2, 4, 8]
    assert explore(RateSearch(1, 12), 0) == [1, 0.5, 0.2, 0.1]
    assert explore(RateSweep(2, 0.5, 3), 0) == [2, 2.5, 3]
    assert explore(RateSweep(math.inf, 1, 5), 0) == [math.inf]


@pytest.mark.parametrize(
    ("capacity", "max_rates", "expected"),
    [
        (1000, 4, "all of which kept the bounds: higher ones may keep them too"),
        (5.6, 5, "below 6 requests/s, which did not keep the bounds"),
        (5.6, 10, None),
    ],
)
def test_a_search_that_runs_out_of_rates_says_so(capacity: float, max_rates: int, expected: str | None) -> None:
    plan = RateSearch(1, max_rates)
    explore(plan, capacity)
    if expected is None:
        assert plan.ended_because is None
    else:
        assert plan.ended_because is not None and plan.ended_because.endswith(expected)


def test_random_prompts_repeat_with_the_seed_and_differ_between_runs() -> None:
    options = WorkloadOptions(num_requests=4, input_len=LengthRange(30, 30), shared_prefix_len=10, num_prefixes=2)
    first, again = (list(RandomWorkload(options, as_text=False).requests(0, AT_ONCE)) for _ in range(2))
    later = list(RandomWorkload(options, as_text=False).requests(1, AT_ONCE))
    assert first == again
    heads = [request.prompt[:10] for request in first + later]
    assert heads[0::2] == [heads[0]] * 4 and heads[1::2] == [heads[1]] * 4 and heads[0] != heads[1]
    assert len({str(request.prompt[10:]) for request in first + later}) == 8
    with pytest.raises(UsageError, match="longer than the shortest prompt"):
        RandomWorkload(WorkloadOptions(shared_prefix_len=200), as_text=False)


def test_words_share_what_the_ids_share() -> None:
    options = WorkloadOptions(num_requests=2, input_len=LengthRange(30, 30), shared_prefix_len=10)
    first, second = (str(it.prompt).split() for it in RandomWorkload(options, as_text=True).requests(0, AT_ONCE))
    assert len(first) == 30
    assert first[:10] == second[:10] and first[10:] != second[10:]


def test_prompts_of_a_file_start_again_and_shuffle() -> None:
    prompts = [(name, None) for name in "abcde"]
    workload = ListWorkload(prompts, WorkloadOptions(num_requests=7))
    assert "".join(str(it.prompt) for it in workload.requests(0, AT_ONCE)) == "abcdeab"
    shuffled = list(ListWorkload(prompts, WorkloadOptions(shuffle=True)).requests(0, AT_ONCE))
    assert sorted(str(it.prompt) for it in shuffled) == list("abcde")
    assert [it.prompt for it in shuffled] != list("abcde")


@pytest.mark.parametrize(
    ("name", "content", "column", "message"),
    [
        ("a.csv", "", 0, "has no prompts"),
        ("a.csv", "x,y\n1\n", 1, "row 2 has nothing in column 1"),
        ("a.csv", "x,y\n1,2\n", "z", "no column 'z'; it has x, y"),
        ("a.jsonl", '{"prompt": "a"}\n{"prompt": 1}\n', 0, "line 2: prompt: "),
        ("a.jsonl", '{"text": "a"}\n', 0, "exactly one of prompt, input_tokens and messages"),
        ("a.jsonl", "{\n", 0, "line 1 is not JSON"),
        ("a.jsonl", '{"prompt": "a", "max_tokens": 0}\n', 0, "max_tokens"),
        ("a.csv", b"\xff\xfe\xff", 0, "cannot read"),
    ],
)
def test_files_of_prompts_that_are_none(
    tmp_path: Path, name: str, content: str | bytes, column: int | str, message: str
) -> None:
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UsageError, match=message):
        read_prompts(tmp_path / name, column)


def test_long_prompts_in_csv_files(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('"' + "word " * 100_000 + '"\n')
    assert len(str(read_prompts(tmp_path / "a.csv", 0)[0][0])) == 500_000


def test_traces_that_are_none(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    for content, message in (("", "has no requests"), ('{"timestamp": 0}', "line 1: input_length"), ("[", "not JSON")):
        file.write_text(content)
        with pytest.raises(UsageError, match=message):
            read_trace(file, duration_s=math.inf, limit=None)
    with pytest.raises(UsageError, match="cannot read"):
        read_trace(tmp_path / "absent", duration_s=math.inf, limit=None)


def test_a_trace_is_read_in_the_order_of_time(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    lines = [{"timestamp": time, "input_length": 1, "output_length": 1} for time in (3000, 1000, 2000, 4000)]
    file.write_text("\n\n".join(map(json.dumps, lines)))
    assert [it.timestamp for it in read_trace(file, duration_s=2, limit=None)] == [1000, 2000]
    assert [it.timestamp for it in read_trace(file, duration_s=math.inf, limit=3)] == [1000, 2000, 3000]


@given(
    st.lists(st.tuples(st.integers(1, 3000), st.lists(st.integers(0, 5), max_size=6)), min_size=1, max_size=5),
    st.integers(20, 4000),
)
def test_prompts_of_a_trace_fit_and_share_as_far_as_their_hashes_do(
    shapes: list[tuple[int, list[int]]], max_model_len: int
) -> None:
    lines = [
        TraceLine(timestamp=0, input_length=length, output_length=100, hash_ids=hashes) for length, hashes in shapes
    ]
    workload = TraceWorkload(lines, WorkloadOptions(max_model_len=max_model_len), as_text=False)
    requests = list(workload.requests(0, AT_ONCE))
    for request in requests:
        assert len(request.prompt) >= 1
        assert len(request.prompt) + request.max_tokens <= max_model_len
    for (line, request), (other_line, other) in itertools.combinations(zip(lines, requests, strict=True), 2):
        hashes = zip(line.hash_ids, other_line.hash_ids, strict=False)
        num_equal = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], hashes))
        shared = min(num_equal * workload.block_size, len(request.prompt), len(other.prompt))
        assert request.prompt[:shared] == other.prompt[:shared]
        following = (request.prompt[shared : shared + 8], other.prompt[shared : shared + 8])
        assert len(following[0]) < 8 or len(following[1]) < 8 or following[0] != following[1]


def slow_distance(first: str, second: str) -> int:
    row = list(range(len(second) + 1))
    for i, a in enumerate(first, 1):
        left, row[0] = row[0], i
        for j, b in enumerate(second, 1):
            left, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, left + (a != b))
    return row[-1]


@given(st.text("abc ", max_size=12), st.text("abc ", max_size=12))
def test_the_edit_distance_is_the_textbook_one(first: str, second: str) -> None:
    longer = max(len(first), len(second), 1)
    assert levenshtein_ratio(first, second) == pytest.approx(1 - slow_distance(first, second) / longer)


@given(st.text("ab c", max_size=20), st.text("ab c", max_size=20))
def test_likeness_is_a_symmetric_share(first: str, second: str) -> None:
    assert 0 <= rouge_w(first, second) <= 1 + 1e-9
    assert rouge_w(first, second) == pytest.approx(rouge_w(second, first))
    assert rouge_w(first, first) == pytest.approx(1)


def test_rouge_w_prefers_words_in_a_row() -> None:
    # Lin's example: the same subsequence of four words, once in a row.
    text = "A B C D E F G"
    assert rouge_w(text, "A B C D H I K") > rouge_w(text, "A H B K C I D")
    assert rouge_w(text, "A B C D H I K") == pytest.approx(4 / 7)
    assert rouge_w(text, "X Y") == 0
    assert rouge_w("天地", "天人") == pytest.approx(0.5)


def test_where_answers_part() -> None:
    assert compare(0, "same", "same").first_mismatch is None
    assert compare(0, "abc", "abd").first_mismatch == 2
    shorter = compare(0, "one two", "one two three")
    assert shorter.first_mismatch == 7
    assert not shorter.is_suspicious(DiffOptions())
    assert shorter.is_suspicious(DiffOptions(mismatch_threshold=8))
    assert compare(0, "one", "two").is_suspicious(DiffOptions())
    assert [it.index for it in compare_texts(["a", "b"], [None, "c"], "x")] == [1]
    with pytest.raises(UsageError, match="1 answers, but there are 2"):
        compare_texts(["a"], ["a", "b"], "x")
