"""How errors stand in the log."""

import logging

import pytest

from nanovllm.errors import EngineDeadError, InvalidRequestError, PluginError, log_failure


@pytest.mark.parametrize(
    ("error", "has_traceback"),
    [
        (EngineDeadError("a worker process died"), False),
        (InvalidRequestError("the prompt is empty"), False),
        (PluginError.of('logits_rules="m:C"', "it raised KeyError"), True),
        (KeyError("x"), True),
        (KeyboardInterrupt(), True),
    ],
)
def test_only_a_fault_has_a_traceback(
    caplog: pytest.LogCaptureFixture, error: BaseException, has_traceback: bool
) -> None:
    """Symptom: each stream writes a traceback to the log when a rank has died."""
    try:
        raise error
    except BaseException as caught:
        log_failure(logging.getLogger("nanovllm.test"), caught, "a stream failed")
    assert ("Traceback" in caplog.text) is has_traceback
    assert "a stream failed" in caplog.text
    assert str(error) in caplog.text
