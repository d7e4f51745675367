"""A picture of a fit: what was measured against what was predicted without having seen it."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ksana.cli.output_files import write_file
from ksana.errors import UsageError
from ksana.perf.fitting import Fit


def plot_fit(fit: Fit, file: Path) -> None:
    """Draw the batches on two logarithmic axes, with matplotlib; on the diagonal, prediction and measurement agree.

    Raises:
        UsageError: matplotlib does not know the kind of file by its ending, or cannot write it.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullFormatter

    figure = Figure(figsize=(6.4, 6.4), layout="constrained")
    axes = figure.add_subplot()
    decodes = np.array([batch.num_forwarding_tokens == batch.num_requests for batch in fit.batches])
    measured, predicted = fit.measured * 1e3, fit.held_out * 1e3
    for label, chosen, marker in (("decode only", decodes, "o"), ("with prefill", ~decodes, "^")):
        axes.scatter(measured[chosen], predicted[chosen], marker=marker, alpha=0.7, label=label)
    ends = [min(measured.min(), predicted.min()) * 0.9, max(measured.max(), predicted.max()) * 1.1]
    axes.plot(ends, ends, color="grey", linewidth=1)
    axes.set(xscale="log", yscale="log", xlabel="measured, ms a step", ylabel="predicted while held out, ms a step")
    quality, environment = fit.model.quality, fit.model.environment
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter(NullFormatter())
    axes.set_title(
        f"{environment.model}, {environment.dtype}, {environment.backend}\n"
        f"held-out error {quality.held_out.mean_error:.1%} in the mean"
    )
    axes.legend()
    axes.grid(visible=True, alpha=0.3)
    try:
        write_file(file, lambda part: figure.savefig(part, dpi=150))
    except ValueError as error:
        raise UsageError(f"cannot write {file}: {' '.join(str(error).split())}") from error
