"""Composing the typed configuration from defaults, a YAML file, the environment and the command line."""
