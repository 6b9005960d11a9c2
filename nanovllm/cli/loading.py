"""Loads the model of a command, with the sampling that it recommends."""

import dataclasses
import typing
from collections.abc import Mapping
from typing import Any

from nanovllm import demo_model
from nanovllm.cli.flag_groups import CHAT_SAMPLING, MAX_TOKENS
from nanovllm.options.sampling_params import SamplingParams
from nanovllm.server.options import model_name
from nanovllm.utils.terminal import complain, note

if typing.TYPE_CHECKING:
    from nanovllm.llm import LLM


def shown_model(model: str) -> str:
    """Return how messages call a model."""
    if model == demo_model.MODEL:
        return "the glossary model that ships with nanovllm"
    return model_name(model)


def load(
    options: dict[str, Any], flags: dict[str, Any], *, is_named: bool, is_chat: bool
) -> "tuple[LLM, SamplingParams]":
    """Return the model and its recommended sampling parameters, overridden by the flags.

    Args:
        is_named: whether the user named the model; else one line says which it is.
        is_chat: whether it answers messages; then `CHAT_SAMPLING` counts where the checkpoint
            recommends no sampling.
    """
    name = shown_model(options["model"])
    if is_named:
        note(f"nanovllm: loading {name}")
    else:
        complain(f"nanovllm: no MODEL is named, so {name} answers")
    try:
        from nanovllm.llm import LLM

        llm = LLM(**options)
    except KeyboardInterrupt:
        complain("nanovllm: interrupted while loading the model")
        raise
    recommended = llm.engine.generation_config
    params = llm.get_default_sampling_params()
    if is_chat and options.get("generation_config") != "vllm":
        params = dataclasses.replace(params, **_chat_sampling(recommended, flags))
    if recommended.get("max_new_tokens") is None:
        flags = {"max_tokens": MAX_TOKENS, **flags}
    return llm, dataclasses.replace(params, **flags)


def _chat_sampling(recommended: Mapping[str, Any], flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a chat samples with, where the checkpoint has no say in it; say so in a line."""
    decides = recommended.get("do_sample") is False
    if decides or any(recommended.get(name) is not None for name in CHAT_SAMPLING):
        return {}
    chosen = {name: value for name, value in CHAT_SAMPLING.items() if name not in flags}
    if chosen and flags.get("temperature") != 0:
        values = ", ".join(f"{name} {value}" for name, value in chosen.items())
        note(f"nanovllm: the model recommends no sampling, so a chat takes {values}")
    return chosen
