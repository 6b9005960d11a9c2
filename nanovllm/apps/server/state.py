"""What the routes of one app share."""

import hashlib
import time
import uuid
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastapi import Request

from nanovllm import __version__
from nanovllm.apps.server.adapters import Adapters
from nanovllm.apps.server.admission import MANY_BODIES, AdmissionControl, AnswerBudget, BodyBudget
from nanovllm.apps.server.error_bodies import APIError, unknown_model
from nanovllm.apps.server.output_parsers.answer_format import AnswerFormat, find_answer_format
from nanovllm.apps.server.prometheus import ServerMetrics
from nanovllm.apps.server.server_options import ServerOptions, check_options, model_name
from nanovllm.async_llm import AsyncLLM
from nanovllm.chat.pictures import below, nowhere
from nanovllm.core.worker_info import WorkerInfo
from nanovllm.engine.engine_thread import FairExecutor
from nanovllm.errors import InvalidRequestError
from nanovllm.loading.tokenizer import token_bytes
from nanovllm.options.config import Config
from nanovllm.options.lora_request import LoRARequest

if TYPE_CHECKING:
    from nanovllm.apps.server.weight_transfer import WeightTransfer


class ServerState:
    """The engine and what the server knows besides it."""

    def __init__(self, llm: AsyncLLM, options: ServerOptions) -> None:
        engine = llm.engine
        _ = engine.input_processor.limit.bound  # computed now, so that no request waits for it
        check_options(options, engine.config)
        tokenizer = engine.input_processor.tokenizer
        self.llm = llm
        self.options = options
        given = options.served_model_name
        self.names = given.split(",") if given else [model_name(engine.config.model)]
        self.model_name = self.names[0]
        """Name of the model in answers to requests that do not name it."""
        self.arithmetic = engine.worker_info.arithmetic
        self.fingerprint = _fingerprint(engine.config, engine.worker_info)
        """Names what makes the answers: version, model and arithmetic."""
        self.adapters = Adapters(
            options.lora_modules,
            (*self.names, engine.config.model),
            engine.input_processor.find_adapter,
            options.lora_directory,
        )
        self.chat_template = options.chat_template
        """Renders conversations; None is the checkpoint's."""
        self.metrics = ServerMetrics(self.model_name, llm)
        self.admission = AdmissionControl(
            options.max_waiting, lambda: len(engine.scheduler.running), options.read_timeout
        )
        self.bodies = BodyBudget(options.max_body_bytes)
        self.answers = AnswerBudget(MANY_BODIES * options.max_body_bytes)
        allowed = options.allowed_local_media_path
        self.locate = nowhere if allowed is None else below(Path(allowed))
        """Finds the files of pictures that requests name."""
        self.max_model_len = engine.worker_info.max_model_len
        self.token_bytes = (lambda token: b"") if tokenizer is None else token_bytes(tokenizer)
        self.refuses_in_pause = False
        """Whether requests that come in a pause are refused; else they wait for its end."""
        self.failure: str | None = None
        """Why the engine is dead; None while it lives."""
        self.preparing = FairExecutor(2, "nanovllm-prepare")
        """Renders conversations, and tokenizes for /tokenize."""
        self.opening = FairExecutor(1, "nanovllm-pictures")
        """Opens pictures, so that nothing but other pictures waits for a heavy one."""
        self.compiling = FairExecutor(2, "nanovllm-grammar")
        """Compiles grammars, so that nothing but other grammars waits for a heavy one."""
        self.loading = FairExecutor(1, "nanovllm-adapters")
        self.start_time = int(time.time())

    @property
    def has_chat_template(self) -> bool:
        """Whether there is a template for conversations, of the checkpoint or from an option."""
        tokenizer = self.llm.engine.input_processor.tokenizer
        own = tokenizer is not None and tokenizer.chat_template is not None
        return own or self.chat_template is not None

    @cached_property
    def answer_format(self) -> AnswerFormat:
        """How the model marks reasoning and tool calls. It may render the chat template."""
        processor = self.llm.engine.input_processor
        if (tokenizer := processor.tokenizer) is None:
            return find_answer_format(None, *self.options.parsers)
        template = tokenizer.chat_template if self.chat_template is None else self.chat_template
        if isinstance(template, dict):  # several templates by name
            template = template.get("tool_use", template.get("default"))
        if not processor.limit.generates:
            template = None
        shape = None if template is None else processor.chat.shape(template)
        added = tokenizer.added_tokens_decoder
        return find_answer_format(template, *self.options.parsers, added, shape)

    @cached_property
    def transfer(self) -> "WeightTransfer":
        from nanovllm.apps.server.weight_transfer import WeightTransfer

        return WeightTransfer(self.llm)

    def check_awake(self) -> None:
        """Raise APIError, status 503, if the engine sleeps or soon will, lacks weights, or has a
        pause that keeps nothing.
        """
        engine = self.llm.engine
        if engine.is_paused:
            if self.refuses_in_pause:
                raise APIError(
                    503,
                    "the engine is paused: POST /resume ends it; with mode=keep requests wait",
                    code="paused",
                )
        elif (weights := engine.weights) is not None:
            if weights.is_sleeping:
                raise APIError(503, "the engine sleeps: POST /wake_up ends it", code="sleeping")
            try:
                weights.require_ready()
            except InvalidRequestError as error:
                raise APIError(503, str(error), code="not_ready") from None

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
        if name in (None, *self.names, self.llm.engine.config.model):
            return None
        adapters = self.adapters.by_name
        if name in adapters:
            return adapters[name]
        raise unknown_model(name, [*self.names, *adapters])

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


def _fingerprint(config: Config, info: WorkerInfo) -> str:
    """Return a name of what decides an answer's bits besides the request."""
    decisive: Any = (config, info.num_blocks)
    arithmetic = info.arithmetic
    is_invariant = arithmetic is not None and arithmetic.batch_invariant
    if is_invariant:  # then the other options change no bit
        model = config.model, config.revision, config.hf_overrides, config.seed
        decisive = (*model, info.block_size, config.logprobs_mode, arithmetic)
    digest = hashlib.sha256(repr(decisive).encode()).hexdigest()
    return f"nanovllm-{__version__}-{'invariant-' * is_invariant}{digest[:8]}"


def state_of(request: Request) -> ServerState:
    state: ServerState = request.app.state.server
    return state
