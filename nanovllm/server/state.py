"""What the routes of one app share. Knows no routes."""

import dataclasses
import hashlib
import time
import uuid
from collections.abc import Callable
from itertools import islice
from typing import Any

from fastapi import Request

from nanovllm import __version__
from nanovllm.async_llm import AsyncLLM
from nanovllm.checkpoint.tokenizer import token_bytes
from nanovllm.engine.fair_executor import FairExecutor
from nanovllm.options.lora_request import LoRARequest
from nanovllm.options.validation import shown
from nanovllm.server.adapters import Adapters, check_adapter_options
from nanovllm.server.admission import Admission, BodyBudget
from nanovllm.server.answers import AnswerFormat, find_answer_format
from nanovllm.server.error_bodies import APIError
from nanovllm.server.options import ServerOptions, model_name
from nanovllm.server.prometheus import ServerMetrics

_MOST_NAMES = 8
"""Adapters that an error lists."""
_MANY_BODIES = 64
"""So many bodies of max_body_bytes are in memory at most."""


@dataclasses.dataclass
class ServerState:
    """The engine and what the server knows beside it."""

    llm: AsyncLLM
    options: ServerOptions
    model_name: str
    """Name of the model in answers."""
    admission: Admission
    bodies: BodyBudget
    chat_template: str | None
    """Renders conversations; None is the checkpoint's."""
    answer_format: AnswerFormat
    """How the model marks reasoning and tool calls."""
    metrics: ServerMetrics
    max_model_len: int
    adapters: Adapters
    fingerprint: str
    """Names what makes the answers: version and model."""
    token_bytes: Callable[[int], bytes]
    """The bytes of a token; none without a tokenizer."""
    failure: str | None = None
    """Why the engine is dead; None while it lives."""
    preparing: FairExecutor = dataclasses.field(
        default_factory=lambda: FairExecutor(2, "nanovllm-prepare")
    )
    """Renders conversations, and tokenizes for /tokenize."""
    compiling: FairExecutor = dataclasses.field(
        default_factory=lambda: FairExecutor(2, "nanovllm-grammar")
    )
    """Compiles grammars, so that nothing but other grammars waits for a heavy one."""
    loading: FairExecutor = dataclasses.field(
        default_factory=lambda: FairExecutor(1, "nanovllm-adapters")
    )
    """Reads adapters, one at a time."""
    start_time: int = dataclasses.field(default_factory=lambda: int(time.time()))
    """Unix time in seconds."""

    def answer_head(self, prefix: str, request_id: str | None, name: str | None) -> dict[str, Any]:
        """Return what an answer to a request for the model `name`, or each chunk, begins with."""
        return {
            "id": f"{prefix}-{request_id or uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": self.name_in_answer(name),
            "system_fingerprint": self.fingerprint,
        }

    def name_in_answer(self, name: str | None) -> str:
        """Return how an answer calls the model that a request names, which `check_model` found."""
        return self.model_name if name in (None, self.llm.engine.config.model) else str(name)

    def check_model(self, name: str | None) -> LoRARequest | None:
        """Return the adapter that a request names as its model; None is the model itself.

        Raises:
            APIError: status 404: there is no such model.
        """
        if name in (None, self.model_name, self.llm.engine.config.model):
            return None
        adapters = self.adapters.by_name
        if name in adapters:
            return adapters[name]
        known = ", ".join(map(shown, [self.model_name, *islice(adapters, _MOST_NAMES)]))
        if len(adapters) > _MOST_NAMES:
            known += ", ..."
        raise APIError(
            404,
            f"the model {shown(name)} does not exist; this server has {known}",
            param="model",
            code="model_not_found",
        )

    def check_priority(self, priority: int | None) -> int:
        """Return a request's priority; raise APIError, status 400, if it may not go so early."""
        if priority is not None and priority < self.options.min_priority:
            raise APIError(
                400,
                f"priority must be at least {self.options.min_priority}, this server's "
                f"min_priority, got {priority}: lower values go first",
                param="priority",
            )
        return priority or 0


def make_state(llm: AsyncLLM, options: ServerOptions) -> ServerState:
    engine = llm.engine
    _ = engine.input_processor.limit.bound  # computed now, so that no request waits for it
    tokenizer = llm.engine.input_processor.tokenizer
    template = options.read_chat_template()
    name = options.served_model_name or model_name(engine.config.model)
    check_adapter_options(options, engine.config)
    digest = hashlib.sha256(repr((engine.config, engine.worker_info.num_blocks)).encode())
    return ServerState(
        llm=llm,
        options=options,
        model_name=name,
        fingerprint=f"nanovllm-{__version__}-{digest.hexdigest()[:8]}",
        adapters=Adapters(
            options.lora_modules,
            (name, engine.config.model),
            engine.input_processor.find_adapter,
            options.lora_directory,
        ),
        chat_template=template,
        answer_format=_answer_format(llm, options, template),
        metrics=ServerMetrics(name, llm),
        admission=Admission(
            options.max_waiting, lambda: len(engine.scheduler.running), options.read_timeout
        ),
        bodies=BodyBudget(_MANY_BODIES * options.max_body_bytes),
        max_model_len=engine.worker_info.max_model_len,
        token_bytes=(lambda token_id: b"") if tokenizer is None else token_bytes(tokenizer),
    )


def _answer_format(llm: AsyncLLM, options: ServerOptions, template: Any) -> AnswerFormat:
    tokenizer = llm.engine.input_processor.tokenizer
    parsers = options.tool_call_parser, options.reasoning_parser
    if tokenizer is None:
        return find_answer_format(None, *parsers)
    template = tokenizer.chat_template if template is None else template
    if isinstance(template, dict):  # several templates by name
        template = template.get("tool_use", template.get("default"))
    return find_answer_format(template, *parsers, tokenizer.added_tokens_decoder)


def state_of(request: Request) -> ServerState:
    state: ServerState = request.app.state.server
    return state
