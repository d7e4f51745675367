"""Whatever an engine promises holds with and without the overlap of steps."""

from __future__ import annotations

import pytest


@pytest.fixture(params=[False, True], ids=["serial", "overlapped"])
def enable_async(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)
