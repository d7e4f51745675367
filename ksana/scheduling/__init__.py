"""Which tokens of which requests are computed in the next step. Pure Python, no torch."""

from ksana.scheduling.refusals import no_token_left_error, queue_full_error
from ksana.scheduling.request_update import RequestUpdate
from ksana.scheduling.scheduler import Scheduler

__all__ = ["RequestUpdate", "Scheduler", "no_token_left_error", "queue_full_error"]
