"""Readers of weight files: each yields (Hugging Face parameter name, CPU tensor), the largest first."""
