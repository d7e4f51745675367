"""Kits for the authors of plugins and for Ksana's own tests."""

from ksana.testing.tiny_models import tiny_model

__all__ = ["tiny_model"]
