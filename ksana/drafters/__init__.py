"""Drafters that need no model: they look for what is about to be generated in what is already there."""
