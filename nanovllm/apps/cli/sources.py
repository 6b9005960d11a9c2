"""Who answers a chat: a model here or a server."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from nanovllm.errors import InvalidRequestError, ServerError
from nanovllm.options.sampling_params import SamplingParams
from nanovllm.outputs import RequestOutput
from nanovllm.utils.terminal import complain, is_interactive, noted_interrupts, spinner

if TYPE_CHECKING:
    from nanovllm.apps.cli.server_client import ServerAddress
    from nanovllm.llm import LLM


class AnswerPiece(NamedTuple):
    """A part of an answer."""

    text: str
    """It may be empty."""
    num_tokens: int = 0
    """How many tokens are new."""


Message = dict[str, str]
Source = Callable[[list[Message], Mapping[str, Any]], Iterator[AnswerPiece]]
"""Answers a conversation, piece by piece, with some sampling parameters changed. It raises
InvalidRequestError or ServerError, or KeyboardInterrupt at the first Ctrl-C, and ends the answer
when the iterator is closed."""

THINK = "<think>\n"
END_THINK = "\n</think>\n\n"
"""What stands around a server's reasoning in an answer, as models themselves write it."""


def model_source(llm: "LLM", params: SamplingParams, template: Mapping[str, Any]) -> Source:
    """Return the answers of a model; `template` are arguments of the chat template."""

    def answer(messages: list[Message], changed: Mapping[str, Any]) -> Iterator[AnswerPiece]:
        prompt = llm.render(messages, add_generation_prompt=True, **template)
        with noted_interrupts() as interrupted:
            for piece in pieces(llm.stream(prompt, dataclasses.replace(params, **changed))):
                if interrupted():
                    raise KeyboardInterrupt
                yield piece

    return answer


def narrated_source(llm: "LLM", source: Source) -> Source:
    """Return the answers of a model, each as one piece of text behind the lines of its steps."""
    from nanovllm.apps.explain.narrate import narrated

    def answer(messages: list[Message], changed: Mapping[str, Any]) -> Iterator[AnswerPiece]:
        text = ""
        with narrated(llm.engine, complain):
            for piece in source(messages, changed):
                text += piece.text
                yield AnswerPiece("", piece.num_tokens)  # so that Ctrl-C stops it
        yield AnswerPiece(text)

    return answer


def server_source(server: "ServerAddress", model: str, fields: Mapping[str, Any]) -> Source:
    """Return the answers of a server's model; `fields` are further ones of each request."""
    from nanovllm.apps.cli import server_client

    if is_interactive():  # where tokens a second are shown
        fields = {**fields, "stream_options": {"include_usage": True}}

    def answer(messages: list[Message], changed: Mapping[str, Any]) -> Iterator[AnswerPiece]:
        sent = [{**message, "content": _without_reasoning(message)} for message in messages]
        body = {**fields, **changed, "model": model, "messages": sent, "stream": True}
        if "extra_args" in body:
            body["vllm_xargs"] = body.pop("extra_args")
        reasons = False
        reason = None
        for data in server_client.stream(server, "/v1/chat/completions", body):
            event = {} if data == "[DONE]" else server_client.parse_event(data)
            text, thought, end = server_client.choice_of(event)
            reason = end or reason
            yield AnswerPiece(THINK * (bool(thought) and not reasons) + thought, _num_tokens(event))
            reasons = reasons or bool(thought)
            yield AnswerPiece(END_THINK * (bool(text) and reasons) + text)
            reasons = reasons and not text
        if reason in (None, "error", "abort"):
            raise ServerError(f"the server broke off its answer: {reason or 'no reason is given'}")

    return answer


def pieces(outputs: Iterator[RequestOutput]) -> Iterator[AnswerPiece]:
    """Yield the pieces of a stream.

    Raises:
        InvalidRequestError: the model failed, such as with logits that are not numbers.
    """
    for output in outputs:
        yield AnswerPiece(output.text, len(output.token_ids))
        if output.finish_reason == "error":
            reason = output.outputs[0].stop_reason
            raise InvalidRequestError(f"the answer ended with an error: {reason}")


def awaited(found: Iterator[AnswerPiece]) -> Iterator[AnswerPiece]:
    """Yield pieces of an answer, with a spinner before the first text."""
    waited = 0
    first = AnswerPiece("")
    with spinner():
        for piece in found:
            if piece.text:
                first = piece
                break
            waited += piece.num_tokens
    yield AnswerPiece(first.text, first.num_tokens + waited)
    yield from found


def _num_tokens(event: Mapping[str, Any]) -> int:
    """Return the tokens of a whole answer, in the event that has its usage; 0 in others."""
    usage = event.get("usage")
    count = usage.get("completion_tokens") if isinstance(usage, dict) else None
    return count if type(count) is int else 0


def _without_reasoning(message: Message) -> str:
    """Return a message's content without the reasoning that an answer begins with."""
    text = message["content"]
    reasons = message["role"] == "assistant" and text.startswith(THINK)
    return text.partition(END_THINK)[2] if reasons else text
