"""What is pushed to an OpenTelemetry collector. All modules here need the extra ``otlp``."""
