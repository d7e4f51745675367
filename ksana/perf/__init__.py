"""Measuring single steps of a model, and fitting a latency model to what was measured.

Simulators need only :class:`LatencyModel`; importing it loads neither torch nor the engine.
"""

from ksana.perf.latency_model import LatencyModel

__all__ = ["LatencyModel"]
