"""Rows with a prompt: each gets the columns of its output, or an error."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from nanovllm.apps.batch.batch_options import RowOptions, check_override
from nanovllm.apps.batch.rows import InputRow, failed_columns, row_id, row_seed
from nanovllm.apps.server.server_options import model_name
from nanovllm.async_llm import AsyncLLM
from nanovllm.errors import ConfigError, EngineDeadError, InvalidRequestError
from nanovllm.options.lora_request import LoRARequest, named_adapters
from nanovllm.options.sampling_params import SamplingParams
from nanovllm.options.validation import shown
from nanovllm.outputs import RequestOutput

MAX_TOKENS = 512
"""max_tokens if neither an option nor the checkpoint sets it, as for `nanovllm generate`."""


class PlainRows:
    """Answers rows with a prompt or messages.

    Raises:
        ConfigError: an adapter of the options cannot be used.
    """

    def __init__(self, llm: AsyncLLM, options: RowOptions) -> None:
        self._llm = llm
        self._options = options
        self._base_names = (None, options.model, model_name(options.model))
        self._adapters = named_adapters(options.batch.lora_modules, self._base_names[1:])
        for adapter in self._adapters.values():
            try:
                llm.engine.input_processor.find_adapter(adapter)
            except InvalidRequestError as error:
                raise ConfigError(f"lora_modules: {error}") from error
        given = dict(options.sampling)
        if llm.engine.generation_config.get("max_new_tokens") is None:
            given.setdefault("max_tokens", MAX_TOKENS)
        self._params = dataclasses.replace(llm.get_default_sampling_params(), **given)

    async def answer(self, row: InputRow) -> dict[str, Any]:
        """Return the output of a row, by column; it has an error if the row is bad.

        Raises:
            EngineDeadError: the engine is down.
        """
        try:
            if row.problem is not None:
                raise InvalidRequestError(row.problem)
            output = await self._generate(row)
        except (ConfigError, InvalidRequestError) as error:
            return failed_columns(str(error))
        failures = [c.stop_reason for c in output.outputs if c.finish_reason == "error"]
        if failures:
            return failed_columns(f"the answer failed: {failures[0]}")
        if any(completion.finish_reason == "abort" for completion in output.outputs):
            raise EngineDeadError("the engine was shut down")
        return _columns(output)

    async def _generate(self, row: InputRow) -> RequestOutput:
        column = self._options.batch.prompt_column
        prompt = row.fields.get(column)
        messages = row.fields.get("messages")
        if (prompt is None) == (messages is None):
            number = "neither" if prompt is None else "both"
            raise InvalidRequestError(f"a row has {shown(column)} or 'messages', got {number}")
        params = self._row_params(row)
        adapter = self._adapter(row)
        if messages is None:
            return await self._llm.generate(prompt, params, lora_request=adapter)  # type: ignore[arg-type]  # it checks
        if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
            raise InvalidRequestError(f"messages must be a list of objects, got {shown(messages)}")
        conversation = [_without_none(message) for message in messages]
        template = self._options.batch.chat_template
        return await self._llm.chat(
            conversation, params, lora_request=adapter, chat_template=template
        )

    def _adapter(self, row: InputRow) -> LoRARequest | None:
        """Return the adapter that a row names as its model; without adapters any name will do."""
        name = row.fields.get("model") if self._adapters else None
        if name in self._base_names:
            return None
        if not isinstance(name, str) or name not in self._adapters:
            names = ", ".join(map(shown, [self._base_names[-1], *self._adapters]))
            raise InvalidRequestError(f"the model {shown(name)} does not exist; there are {names}")
        return self._adapters[name]

    def _row_params(self, row: InputRow) -> SamplingParams:
        given = row.fields.get("sampling_params") or {}
        if not isinstance(given, Mapping):
            raise InvalidRequestError(f"sampling_params must be an object, got {shown(given)}")
        changes = {name: value for name, value in given.items() if value is not None}
        check_override(changes)
        known = {field.name for field in dataclasses.fields(SamplingParams)}
        if changes.keys() - known:
            SamplingParams(**changes)  # says what was meant
        seed = row_seed(self._options.seed, row_id(row, self._options.batch.id_column))
        params = dataclasses.replace(self._params, **{"seed": None, **changes})
        return params.clone(seed=seed) if params.seed is None else params


def _columns(output: RequestOutput) -> dict[str, Any]:
    """Return the columns of an output: a value each, or with n above 1 a list of n."""
    completions = output.outputs

    def each(value: Callable[[Any], Any]) -> Any:
        values = [value(completion) for completion in completions]
        return values if len(values) > 1 else values[0]

    return {
        "generated_text": each(lambda c: c.text),
        "generated_tokens": each(lambda c: list(c.token_ids)),
        "finish_reason": each(lambda c: c.finish_reason),
        "num_input_tokens": len(output.prompt_token_ids),
        "num_generated_tokens": sum(len(c.token_ids) for c in completions),
        "error": None,
    }


def _without_none(value: Any) -> Any:
    """Return a message without the fields that Parquet fills with None."""
    if isinstance(value, dict):
        return {name: _without_none(item) for name, item in value.items() if item is not None}
    return [_without_none(item) for item in value] if isinstance(value, list) else value
