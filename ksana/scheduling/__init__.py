"""Which tokens of which requests are computed in the next step. Pure Python, no torch."""

from ksana.scheduling.scheduler import RequestUpdate, Scheduler, queue_full_error

__all__ = ["RequestUpdate", "Scheduler", "queue_full_error"]
