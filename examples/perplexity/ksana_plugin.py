"""A perplexity postprocessor: says with every answer how sure the model was of it.

Put this file into the model's folder and start with ``--trust-remote-code``. The native API's answers then carry
``"extra": {"perplexity": ...}``.
"""

from __future__ import annotations

import math
from typing import Any


class KsanaPlugin:
    """Perplexity of the generated text: exp of the mean negative log probability of its tokens."""

    def preprocess(self, **kwargs: Any) -> None:
        """Ask the engine for the log probability of each generated token."""
        sampling = kwargs["ksana_python_input"].sampling_config
        sampling.logprobs = max(1, sampling.logprobs)

    def postprocess(self, **kwargs: Any) -> None:
        """Turn them into a perplexity, once the answer is complete."""
        output = kwargs["ksana_python_output"]
        (steps,) = output.logprobs
        # The first pair of a step is the generated token itself.
        logprobs = [pairs[0][1] for pairs in steps]
        if logprobs:
            output.extra["perplexity"] = math.exp(-sum(logprobs) / len(logprobs))
