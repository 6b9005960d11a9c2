"""`Prompt`: text or token ids, from any of the forms that callers give."""

import dataclasses
from collections.abc import Mapping, Sequence as Seq
from typing import Any, NamedTuple

from nanovllm.core.messages import Extras, InputSpan
from nanovllm.errors import InvalidRequestError
from nanovllm.options.validation import plain_text, shown

_MAX_SALT_LENGTH = 128  # characters, as in vLLM: the prefix cache keeps the salts of its blocks


@dataclasses.dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt. It has a text, token ids, or both; the token ids are then what the model reads."""

    text: str | None = None
    token_ids: Seq[int] | None = None
    """Not checked yet."""
    rendered: bool = False
    """Whether the text is that of a chat template, which has its special tokens in it."""
    salt: str | None = None
    """Cached blocks are shared only with prompts of the same salt."""
    pictures: tuple[Any, ...] = ()
    """In the order of their markers: PIL images, bytes or paths of files, numpy arrays."""
    picture_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """`mm_processor_kwargs`."""
    marker_places: tuple[int, ...] | None = None
    """Where the markers of pictures begin in the text; None: all that look so are markers."""


class PromptTokens(NamedTuple):
    """What the model reads of a prompt. See `Sequence` for all but the first."""

    token_ids: list[int]
    inputs: tuple[InputSpan, ...] = ()
    extras: Extras = {}  # noqa: RUF012 (never changed)
    rope_offset: int = 0


PromptInput = str | Seq[int] | Mapping[str, Any] | Prompt
"""Text; token ids, also as a numpy array or torch tensor; or vLLM's {"prompt": text} or
{"prompt_token_ids": ids}, which may have the text as "prompt" beside them. The dictionary's
"cache_salt" is the salt."""


def make_prompt(given: PromptInput) -> Prompt:
    """Return the prompt that a caller gave.

    Raises:
        InvalidRequestError: it has none of the forms of `PromptInput`.
    """
    if isinstance(given, Prompt):
        return given
    if isinstance(given, str):
        return Prompt(plain_text(given))
    if not isinstance(given, Mapping):
        return Prompt(token_ids=_token_ids(given))
    fields = {key: value for key, value in given.items() if value is not None}
    salt = _salt(fields.pop("cache_salt", None))
    pictures = _pictures(fields.pop("multi_modal_data", {}))
    options = fields.pop("mm_processor_kwargs", {})
    if fields.pop("multi_modal_uuids", None) and not pictures:
        raise InvalidRequestError(
            "multi_modal_uuids names pictures that are not in multi_modal_data: give them each "
            "time; one that was encoded before is known by its pixels"
        )
    if not isinstance(options, Mapping):
        raise InvalidRequestError(f"mm_processor_kwargs must be a dictionary, got {shown(options)}")
    unknown = [key for key in fields if key not in ("prompt", "prompt_token_ids")]
    if unknown or not fields:
        found = f"got {shown(unknown[0])}" if unknown else "got neither"
        raise InvalidRequestError(
            f'a prompt dictionary has the key "prompt" (text) or "prompt_token_ids", {found}; '
            'beside it, it may have "multi_modal_data", "mm_processor_kwargs" and "cache_salt"'
        )
    text = fields.get("prompt")
    token_ids = fields.get("prompt_token_ids")
    if not (text is None or isinstance(text, str)):
        raise InvalidRequestError(
            f'the "prompt" of a prompt dictionary must be a string, got {shown(text)}'
        )
    if isinstance(token_ids, str):
        raise InvalidRequestError(
            f"prompt_token_ids must be a list of token ids, got {shown(token_ids)}"
        )
    text = None if text is None else plain_text(text)
    return Prompt(
        text,
        None if token_ids is None else _token_ids(token_ids),
        salt=salt,
        pictures=pictures,
        picture_options=options,
    )


def as_list(given: Any) -> list[Any]:
    """Return the prompts of an argument that is one prompt or a list of them.

    Raises:
        InvalidRequestError: it is neither.
    """
    if isinstance(given, str | bytes | Mapping | Prompt):  # a str of numpy's, too
        return [given]
    given = _array_to_list(given)
    if not isinstance(given, Seq):
        raise InvalidRequestError(
            f"prompts must be a string, token ids, or a list of them, got {type(given).__name__}"
        )
    is_token = given and hasattr(given[0], "__index__") and not getattr(given[0], "ndim", 0)
    return [given] if is_token else list(given)


def one_for_each(name: str, given: Any, num_prompts: int) -> Seq[Any]:
    """Return a value for each prompt: `given` is a list of them, or one for all.

    Raises:
        InvalidRequestError: the list has another length.
    """
    values: Seq[Any] = given
    if not isinstance(given, Seq) or isinstance(given, str | bytes):
        return [given] * num_prompts
    if len(values) != num_prompts:
        raise InvalidRequestError(
            f"{num_prompts} prompts but {len(values)} {name}; "
            "give one for all, or one for each prompt"
        )
    return values


def _array_to_list(value: Any) -> Any:
    """Return a numpy array or torch tensor of integers as lists, and anything else as it is."""
    if not (hasattr(value, "tolist") and hasattr(value, "dtype")):
        return value
    if "int" not in str(value.dtype):
        raise InvalidRequestError(
            f"token ids must be integers, got an array of {value.dtype}; texts are given as a list"
        )
    return value.tolist()


def _pictures(given: Any) -> tuple[Any, ...]:
    """Return the pictures of multi_modal_data, which has one or a list of them."""
    if not isinstance(given, Mapping) or not given.keys() <= {"image"}:
        raise InvalidRequestError(
            f'multi_modal_data must be {{"image": one or a list of them}}, got {shown(given)}; '
            "models here read no video and no audio"
        )
    found = given.get("image")
    return tuple(found) if isinstance(found, list | tuple) else () if found is None else (found,)


def _token_ids(given: Any) -> Seq[int]:
    found = _array_to_list(given)
    if not isinstance(found, Seq) or isinstance(found, bytes):
        raise InvalidRequestError(
            "a prompt must be a string or a list of token ids, "
            f"got {type(found).__name__} {shown(found)}"
        )
    return found


def _salt(given: Any) -> str | None:
    if given is None or (isinstance(given, str) and 0 < len(given) <= _MAX_SALT_LENGTH):
        return given
    found = f"{len(given)}" if isinstance(given, str) else type(given).__name__  # it is a secret
    raise InvalidRequestError(
        f"cache_salt must be a string of 1 to {_MAX_SALT_LENGTH} characters, got {found}"
    )
