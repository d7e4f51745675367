"""``ksana-bench``: load for servers, and what they make of it."""
