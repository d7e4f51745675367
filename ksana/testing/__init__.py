"""Kits for the authors of plugins and for Ksana's own tests."""

from ksana.testing.oracle import TransformersOracle
from ksana.testing.tiny_models import tiny_model

__all__ = ["TransformersOracle", "tiny_model"]
