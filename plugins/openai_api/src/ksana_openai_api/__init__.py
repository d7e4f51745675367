"""The OpenAI HTTP API for Ksana, as a plugin."""
