"""The engine: admission, the step loop, output processing, and the two ways in (async for servers, offline)."""
