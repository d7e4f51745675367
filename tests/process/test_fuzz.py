"""What a client could send by the OpenAPI document, and much that it could not: no 5xx and no hang."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import requests
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

if TYPE_CHECKING:
    import schemathesis
else:
    schemathesis = pytest.importorskip("schemathesis", reason="needs Python 3.11")

ENDLESS = "/engine/stats/stream"
ANSWER_TIMEOUT_S = 30
NUM_EXAMPLES = 40

SETTINGS = settings(
    max_examples=NUM_EXAMPLES, database=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
)


def cases(operation: schemathesis.APIOperation[Any]) -> st.SearchStrategy[schemathesis.Case]:
    valid = operation.as_strategy(generation_mode=schemathesis.GenerationMode.POSITIVE)
    if not operation.body:
        return valid
    return st.one_of(valid, operation.as_strategy(generation_mode=schemathesis.GenerationMode.NEGATIVE))


@pytest.mark.timeout(120)
def test_no_body_breaks_the_server(start, subtests: pytest.Subtests) -> None:
    server = start("--port", "0", "-p", "openai_api", "--max-model-len", "64", "--no-access-log")
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json").exclude(path=ENDLESS)
    checks = [
        schemathesis.checks.not_a_server_error,
        schemathesis.checks.status_code_conformance,
        schemathesis.checks.content_type_conformance,
        schemathesis.checks.response_schema_conformance,
    ]
    with requests.Session() as session:
        for operation in (result.ok() for result in schema.get_all_operations()):

            @SETTINGS
            @given(case=cases(operation))
            def send(case: schemathesis.Case) -> None:
                response = case.call(session=session, timeout=ANSWER_TIMEOUT_S)
                case.validate_response(response, checks=checks)

            with subtests.test(operation=operation.label):
                send()
        assert session.get(f"{server.url}/ready").json() == {"status": "ready"}
    assert "Traceback" not in server.output
