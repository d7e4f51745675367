"""Keys and values as floats of eight bits (Micikevicius et al. 2022), for a cache of half the memory.

All keys and values of a layer are divided by one factor on their way into the cache, and multiplied with it on their
way out, so that they use the range that the format has.
"""

from __future__ import annotations

import torch


def to_float8(x: torch.Tensor, dtype: torch.dtype, scale: float) -> torch.Tensor:
    """``x / scale`` in an eight bit dtype, to nearest; what is beyond its largest number becomes that one."""
    largest = torch.finfo(dtype).max
    return (x.float() / scale).clamp_(-largest, largest).to(dtype)
