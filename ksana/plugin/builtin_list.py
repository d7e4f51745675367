"""The plugins that ship with the core, as plain data: nothing is imported to read this list."""

from __future__ import annotations

BUILTIN_PLUGINS = {
    "cpu_backend": "ksana.builtins.cpu_backend",
    "drafters": "ksana.builtins.drafters",
    "grammar": "ksana.builtins.grammar",
    "hf_models": "ksana.builtins.hf_models",
    "hf_tokenizers": "ksana.builtins.hf_tokenizers",
    "kv_connectors": "ksana.builtins.kv_connectors",
    "kv_events": "ksana.builtins.kv_events",
    "logits_processors": "ksana.builtins.logits_processors",
    "native_api": "ksana.builtins.native_api",
    "page": "ksana.builtins.page",
    "telemetry": "ksana.builtins.telemetry",
}
"""Module of each builtin by plugin name, in the order of registration."""

ESSENTIAL_PLUGINS = frozenset({"cpu_backend", "hf_models", "hf_tokenizers", "logits_processors"})
"""Builtins without which nothing runs, or not as it was asked to. They answer last, so a plugin overrules them without
disabling them."""
