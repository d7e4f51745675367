"""The commands that operators type."""
