"""The plugin API: every hook of Ksana, one screen a file. Loads neither torch nor aiohttp nor transformers."""

from ksana.hookspecs import frontends, kernels, kv, lifecycle, models, processing, scheduling, telemetry

ALL_HOOKSPECS = (lifecycle, models, processing, scheduling, kernels, kv, frontends, telemetry)

__all__ = ["ALL_HOOKSPECS"]
