"""Random requests made from the OpenAPI schema, right and wrong: none makes the server fail."""

from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from nanovllm import AsyncLLM
from tests.server.conftest import running

EXPECTED = (501, 504)
"""Of the statuses above 499: refused by name, and longer than request_timeout."""


def test_no_request_of_the_schema_makes_the_server_fail(async_llm: AsyncLLM) -> None:
    schemathesis = pytest.importorskip("schemathesis")  # takes a second
    with running(async_llm, request_timeout=0.2) as server:
        schema = schemathesis.openapi.from_dict(server.send("/openapi.json").body)
        num_requests = 0
        for result in schema.get_all_operations():
            operation = result.ok()
            if not operation.body:  # nothing to choose
                continue
            for mode in schemathesis.GenerationMode:

                @settings(
                    max_examples=3,
                    deadline=None,
                    derandomize=True,
                    database=None,
                    phases=[Phase.generate],
                    suppress_health_check=list(HealthCheck),
                )
                @given(case=operation.as_strategy(generation_mode=mode))
                def check(case: Any) -> None:
                    nonlocal num_requests
                    num_requests += 1
                    reply = case.call(base_url=server.url, timeout=30)
                    status = reply.status_code
                    assert status < 500 or status in EXPECTED, (case.as_curl_command(), reply.text)
                    assert status < 400 or "error" in reply.json()

                check()
        assert num_requests > 24
