"""How the engine's counts leave the process: scraped by Prometheus, pushed by OpenTelemetry."""
