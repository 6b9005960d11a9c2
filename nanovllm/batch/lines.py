"""The outputs of rows: the columns of a row with a prompt, or a line of OpenAI's output file.

Imports no engine: a driver writes the line of a row that no worker could compute.
"""

from typing import Any

from nanovllm.batch.rows import OPENAI, Row, dumps, short_digest

OUTPUT_COLUMNS = (
    "generated_text",
    "generated_tokens",
    "finish_reason",
    "num_input_tokens",
    "num_generated_tokens",
    "error",
)
"""The columns that rows with a prompt get; names are those of Ray Data's LLM module."""


def failed_columns(error: str) -> dict[str, Any]:
    """Return the columns of a row with an error; what is no character in it is escaped."""
    text = error.encode(errors="backslashreplace").decode()
    return {**dict.fromkeys(OUTPUT_COLUMNS), "error": text}


def openai_line(
    row: Row, status: int, body: dict[str, Any], error: dict[str, Any] | None
) -> dict[str, Any]:
    """Return a line of OpenAI's output file."""
    custom_id = row.fields.get("custom_id")
    digest = short_digest(str(row.number), str(custom_id))
    return {
        "id": f"batch_req_{digest}",
        "custom_id": custom_id,
        "response": {"status_code": status, "request_id": f"req_{digest}", "body": body},
        "error": error,
    }


def openai_failure(row: Row, status: int, body: dict[str, Any]) -> dict[str, Any]:
    """Return the line of a row with an error: `body` is OpenAI's body of an error."""
    error = body["error"]
    code = error.get("code") or error["type"]
    return openai_line(row, status, body, {"code": code, "message": error["message"]})


def error_body(message: str, kind: str = "invalid_request_error") -> dict[str, Any]:
    """Return OpenAI's body of an error."""
    return {"error": {"message": message, "type": kind, "param": None, "code": None}}


def failed_line(form: str, row: Row, error: str) -> bytes:
    """Return the output, as JSON, of a row whose error is not its own."""
    if form == OPENAI:
        return dumps(openai_failure(row, 500, error_body(error, "server_error")))
    return dumps(failed_columns(error))
