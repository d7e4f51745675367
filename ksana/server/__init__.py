"""The HTTP server: application, middlewares, streaming, life cycle. Protocols join through the frontend hooks."""
