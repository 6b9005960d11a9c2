"""Sets up the server's standard error: its log, and what it tells the user who starts it."""

import json
import logging
import time
from typing import Any

from nanovllm.utils.terminal import complain

logger = logging.getLogger(__name__)

LEVELS = ("debug", "info", "warning", "error", "critical")
FORMATS = ("text", "json")
_TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class JSONFormatter(logging.Formatter):
    """Formats a record as one line of JSON: time (UTC), level, logger, message.

    The line of a request has its fields in `request`; an exception's traceback is in `exception`.
    """

    def format(self, record: logging.LogRecord) -> str:
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{seconds}.{int(record.msecs):03d}Z",
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if (request := getattr(record, "request", None)) is not None:
            line["message"] = "{method} {path} {status}".format(**request)
            line["request"] = request
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class Log:
    """Where the server's lines go: to standard error, in the form that the options ask for.

    Records of nanovllm from `level` on are written, and warnings of others.

    Args:
        form: "text", or "json" for a line of JSON each.
    """

    def __init__(self, level: str, form: str) -> None:
        self.is_plain = form == "text"
        """Whether people read it, not programs."""
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter(_TEXT) if self.is_plain else JSONFormatter())
        logging.basicConfig(handlers=[handler])
        logging.getLogger("nanovllm").setLevel(level.upper())

    def tell(self, message: str, level: int = logging.INFO) -> None:
        """Tell the user who started the server something: as it is, or as a line of the log."""
        if self.is_plain:
            complain(message)
        else:
            logger.log(level, "%s", message.removeprefix("nanovllm: ").strip())
