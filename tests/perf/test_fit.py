"""Fits of a latency model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from ksana.errors import UsageError
from ksana.perf.fitting import fit_latency_model
from ksana.perf.grid_command import make_grid
from ksana.perf.latency_model import LatencyModel
from ksana.perf.main import main
from ksana.perf.nnls import nnls
from ksana.perf.result import BatchResult, Environment, PerfResult, Round, Statistics

ENVIRONMENT = Environment(
    ksana="0",
    python="3",
    torch="2",
    processor="p",
    usable_cpus=1,
    model="m",
    architecture="a",
    dtype="float32",
    backend="cpu",
    num_blocks=9,
    settings={},
)


def law(forwarding: list[int], cached: list[int]) -> float:
    """Seconds of a step on an imaginary machine whose tokens cost less from the 32nd on."""
    tokens = sum(forwarding)
    attended = sum(f * c + f * (f + 1) / 2 for f, c in zip(forwarding, cached, strict=True))
    return 0.01 + 2e-4 * len(forwarding) + 1e-3 * min(tokens, 32) + 5e-4 * max(0, tokens - 32) + 1e-6 * attended


def make_result(noise: float = 0.0, last: int | None = None) -> PerfResult:
    generator = np.random.default_rng(1)
    batches = []
    for batch in make_grid(512, 1024, 16).batches[:last]:
        forwarding = [g.forwarding_token_num for g in batch.requests for _ in range(g.request_num)]
        cached = [g.kv_cached_token_num for g in batch.requests for _ in range(g.request_num)]
        ms = law(forwarding, cached) * 1e3 * float(np.exp(noise * generator.standard_normal()))
        batches.append(
            BatchResult(
                name=batch.label,
                requests=batch.requests,
                num_requests=batch.num_requests,
                num_forwarding_tokens=batch.num_forwarding_tokens,
                num_cached_tokens=batch.num_cached_tokens,
                step_ms=Statistics.of([ms]),
                phases_ms={},
                operators_ms={},
                rounds=[Round(step_ms=ms, phases_ms={}, operators_ms={})],
            )
        )
    return PerfResult(created="now", warmup_round=0, stat_round=1, environment=ENVIRONMENT, batches=batches)


def test_a_law_of_this_form_is_found_again() -> None:
    fit = fit_latency_model(make_result())
    assert fit.model.quality.r2 == pytest.approx(1.0)
    assert fit.model.quality.held_out.max_error < 1e-6
    for forwarding, cached in (([1] * 7, [300] * 7), ([100, 1, 1], [0, 900, 5]), ([2000], [0])):
        assert fit.model.predict(forwarding, cached) == pytest.approx(law(forwarding, cached))


def test_noise_shows_in_the_held_out_error_and_not_in_the_signs() -> None:
    fit = fit_latency_model(make_result(noise=0.1))
    assert 0.03 < fit.model.quality.held_out.mean_error < 0.2
    assert min(fit.model.seconds.values()) >= 0.0
    again = fit_latency_model(make_result(noise=0.1))
    assert again.model == fit.model


def test_small_steps_alone_still_give_later_tokens_a_price() -> None:
    result = make_result()
    few = [batch for batch in result.batches if batch.num_forwarding_tokens <= 16]
    model = fit_latency_model(result.model_copy(update={"batches": few})).model
    assert model.fitted_range.max_tokens == 16
    assert model.predict([500], [0]) > 10 * model.predict([16], [0])


def test_too_few_batches_are_refused() -> None:
    with pytest.raises(UsageError, match="needs at least 8"):
        fit_latency_model(make_result(last=7))
    with pytest.raises(UsageError, match="--folds 9 is not valid: must be from 2 to the number of batches, 8"):
        fit_latency_model(make_result(last=8), folds=9)


def test_the_command_writes_model_and_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    source, output, plot = (tmp_path / name for name in ("result.json", "model.json", "fit.png"))
    source.write_text(make_result(noise=0.05).model_dump_json())
    assert main(["fit", str(source), "--output", str(output), "--plot", str(plot)]) == 0
    assert "held out, 5 folds: R2 0.9" in capsys.readouterr().out
    assert plot.read_bytes().startswith(b"\x89PNG")
    code = (
        "import sys; from ksana.perf import LatencyModel; model = LatencyModel.load(sys.argv[1]); "
        "print(model.predict([1] * 8, [512] * 8), 'torch' in sys.modules, 'ksana.engine' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(output)], capture_output=True, text=True, check=True)
    seconds, *heavy = done.stdout.split()
    assert float(seconds) == pytest.approx(law([1] * 8, [512] * 8), rel=0.2)
    assert heavy == ["False", "False"]


def test_a_picture_of_an_unknown_kind_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    source = tmp_path / "result.json"
    source.write_text(make_result().model_dump_json())
    assert main(["fit", str(source), "--plot", str(tmp_path / "fit.doc")]) == 2
    assert "cannot write" in capsys.readouterr().err


def test_a_model_with_other_features_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.json"
    content = json.loads(fit_latency_model(make_result()).model.model_dump_json())
    content["seconds"]["sunshine"] = 1.0
    file.write_text(json.dumps(content))
    with pytest.raises(UsageError, match="must have exactly the features constant, "):
        LatencyModel.load(file)


def test_requests_without_a_cached_count_are_refused() -> None:
    with pytest.raises(ValueError, match="2 numbers of forwarding tokens, but 1 of cached"):
        fit_latency_model(make_result()).model.predict([1, 1], [5])


numbers = st.floats(-10, 10, width=32).map(lambda value: round(value, 2))


@given(st.data())
def test_nnls_is_optimal(data: st.DataObject) -> None:
    """The conditions of Karush, Kuhn and Tucker: no coefficient below zero, and none that should be another."""
    rows, columns = data.draw(st.integers(1, 8)), data.draw(st.integers(1, 5))
    matrix = data.draw(arrays(np.float64, (rows, columns), elements=numbers))
    target = data.draw(arrays(np.float64, rows, elements=numbers))
    x = nnls(matrix, target)
    gradient = matrix.T @ (matrix @ x - target)
    slack = 1e-6 * (1 + np.abs(matrix).sum() * (1 + np.abs(target).sum()))
    assert (x >= 0).all()
    assert (gradient >= -slack).all()
    assert (np.abs(gradient[x > 0]) <= slack).all()
