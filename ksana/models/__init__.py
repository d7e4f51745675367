"""From model folders and files to models: configurations, weights, tokenizers, the Llama family."""
