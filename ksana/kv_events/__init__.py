"""The content of the KV cache as a stream of events: recorded in the engine, published, and followed elsewhere."""
