"""The logits processors that ship with the core, for the options of :class:`ksana.types.sampling.SamplingParams`."""
