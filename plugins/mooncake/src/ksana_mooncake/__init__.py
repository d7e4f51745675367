"""A KV cache that several servers share, on Mooncake Store, as a plugin."""
