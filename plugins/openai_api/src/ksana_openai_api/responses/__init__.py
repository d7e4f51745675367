"""The Responses API: ``/v1/responses``, a conversation that the server remembers."""
