"""The builtin CPU backend."""
