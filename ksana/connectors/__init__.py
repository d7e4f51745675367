"""KV connectors: how blocks of the KV cache leave this engine's cache, and how they come back."""
