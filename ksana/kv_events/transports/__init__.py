"""Ways of events between processes. Their libraries come with the extra ``events``."""
