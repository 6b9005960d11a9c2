"""What requests have in common: sampling parameters, forms, streaming, conversations, tools.

Types only: ranges are checked by `SamplingParams`, which has the better messages, and
`nanovllm.chat.openai_messages` prepares messages for templates.
"""

from collections.abc import Iterable
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    model_validator,
)
from pydantic_core import PydanticCustomError

from nanovllm.apps.server.output_parsers.answer_format import ToolChoice
from nanovllm.apps.server.output_parsers.parameter_types import ParameterTypes
from nanovllm.chat.openai_messages import counts_as_absent, is_empty
from nanovllm.options.other_names import OTHER_NAMES, OtherName, find_other, other_names
from nanovllm.options.validation import did_you_mean, shown

STRING_OR_LIST = "should be a valid string or a valid list"


def _text_or_list(value: Any) -> str | None:
    if isinstance(value, str):
        return "text"
    return "list" if isinstance(value, list) else None


TEXT_OR_LIST = Discriminator(
    _text_or_list, custom_error_type="kind", custom_error_message=STRING_OR_LIST
)
"""Tells a text from a list, whose tags are "text" and "list"."""

IGNORED = frozenset(
    (
        *("metadata", "store", "service_tier", "safety_identifier", "session_id"),
        *("prompt_cache_key", "prompt_cache_retention", "prompt_cache_options", "prediction"),
    )
)
"""Fields of OpenAI's and vLLM's that are accepted with any value: they do not change the answer."""


class RequestModel(BaseModel):
    """A part of a request. A field that is not known is refused."""

    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())

    others: ClassVar[dict[str, OtherName]] = {}
    """Fields that are accepted with some values only, which change nothing."""
    not_taken: ClassVar[frozenset[str]] = frozenset()
    """Fields of the base that are in `others`."""
    ignored: ClassVar[frozenset[str]] = frozenset()
    """Fields that are accepted and dropped."""
    empty_is_absent: ClassVar[frozenset[str]] = frozenset()
    """Fields whose empty text, list or object means what null does."""

    @model_validator(mode="before")
    @classmethod
    def _check_names(cls, given: Any) -> Any:
        """Drop the fields of `others` and `ignored`, and those that are null unless they are
        required; refuse one that is unknown.
        """
        if not isinstance(given, dict):
            return given
        fields = {field.alias or name: field for name, field in cls.model_fields.items()}
        known = fields.keys() - cls.not_taken
        absent = {name for name in cls.empty_is_absent & given.keys() if is_empty(given[name])}
        absent |= {
            n for n in given.keys() & known if given[n] is None and not fields[n].is_required()
        }
        kept = {name: given[name] for name in given.keys() & known if name not in absent}
        for name in sorted(given.keys() - known - cls.ignored):
            value = given[name]
            other = find_other(cls.others, name)
            if value is None or (other and (value == "" or other.accepts(value))):
                continue
            if other and other.remedy:
                raise refused(name, f"{name}={shown(value)} is not supported: {other.remedy}")
            hint = did_you_mean(name, known)
            hint = hint if len(hint) < 500 else "; /openapi.json lists all"
            raise refused(name, f"there is no field {shown(name)}{hint}")
        return kept


def refused(field: str, message: str, code: str | None = None) -> PydanticCustomError:
    """Return the error to raise in a validator: `message`, about one field of the model.

    Clients look for `code`, the API's name of the error.
    """
    context = {"message": message, "field": field, "code": code}
    return PydanticCustomError("refused", "{message}", context)


def few_in_all(field: str, what: str, limit: int, *, depth: int = 1) -> BeforeValidator:
    """Return a check that the objects of a list have few items in their lists `field`, in all:
    checking each item takes time.

    Args:
        what: errors call the items so.
        depth: 2 also counts the items of the items.
    """

    def check(given: Any) -> Any:
        items = given if isinstance(given, list) else []
        num_items = 0
        for _ in range(depth):
            lists = [each.get(field) for each in items if isinstance(each, dict)]
            items = [item for each in lists if isinstance(each, list) for item in each]
            num_items += len(items)
        if num_items > limit:
            context = {"limit": limit}
            raise PydanticCustomError("too_many", f"must have at most {{limit}} {what}", context)
        return given

    return BeforeValidator(check)


class StreamOptions(RequestModel):
    include_usage: bool | None = None
    """Send one more chunk with the usage at the end."""
    continuous_usage_stats: bool | None = None
    """Send the usage so far with each chunk, too; with include_usage only, as in vLLM."""
    include_obfuscation: bool | None = None
    """OpenAI's padding of chunks; there is none."""

    @property
    def with_each_chunk(self) -> bool:
        """Whether each chunk has the usage so far."""
        return bool(self.include_usage and self.continuous_usage_stats)


class JSONSchema(RequestModel):
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | bool | None = Field(default=None, alias="schema")
    strict: bool | None = None

    def form(self) -> dict[str, Any]:
        """Return the form of the answer; without a schema any JSON."""
        return {"json": self.schema_ if isinstance(self.schema_, dict) else {}}


def check_schema(kind: str, schema: JSONSchema | None, field: str) -> None:
    """Refuse a type "json_schema" without a schema, in `field`, and a schema of another type."""
    has_schema = schema is not None and schema.schema_ is not None
    if kind == "json_schema" and not has_schema:
        raise refused(field, f"a form of type json_schema needs {field}")
    if kind != "json_schema" and has_schema:
        raise refused("type", f'a schema needs the type "json_schema", got {shown(kind)}')


class ResponseFormat(RequestModel):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JSONSchema | None = None

    @model_validator(mode="before")
    @classmethod
    def _take_other_forms(cls, given: Any) -> Any:
        """Read a schema beside the type, where llama.cpp has it, and TGI, whose client
        huggingface_hub writes every schema so.
        """
        kind = given.get("type") if isinstance(given, dict) else None
        if kind == "structural_tag":
            what = "use tools, or structured_outputs with a grammar"
            raise refused(
                "type", f"response_format of type structural_tag is not supported: {what}"
            )
        if kind in ("json_object", "json", "json_schema") and given.get("json_schema") is None:
            for name in ("schema", "value"):
                if given.get(name) is not None:
                    rest = {key: value for key, value in given.items() if key != name}
                    schema = {"schema": given[name]}
                    return {**rest, "type": "json_schema", "json_schema": schema}
        return given

    @model_validator(mode="after")
    def _check_schema(self) -> "ResponseFormat":
        check_schema(self.type, self.json_schema, "json_schema.schema")
        return self


_FEW = Field(max_length=64, fail_fast=True)
_MANY = Field(max_length=1024, fail_fast=True)
_MANY_KEYS = Field(max_length=1024)
ShortText = Annotated[str, Field(max_length=1024)]
BadWords = Annotated[
    list[Annotated[str, Field(max_length=64)]], Field(max_length=256, fail_fast=True)
]
"""Has a lower bound, because each sequence keeps them as a table on the device."""
Objects = Annotated[list[dict[str, Any]], Field(max_length=4096, fail_fast=True)]
"""Parts of a content, documents, and the like."""


_GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
_LARGE_FIELDS = frozenset(
    (
        *("prompt", "messages", "tools", "documents", "chat_template_kwargs"),
        *("structured_outputs", "response_format", "bad_words", "allowed_token_ids", "logit_bias"),
        *(*_GUIDED, "user"),
    )
)
"""Fields that are not needed any more once the engine has the request."""


class EngineRequest(RequestModel):
    """The fields of every request that waits for the engine."""

    model: str | None = None
    priority: int | None = None
    user: str | None = None
    """The key of fairness: users take turns in the queue."""


class StreamableRequest(EngineRequest):
    """The fields of every request for tokens."""

    request_id: str | None = Field(default=None, min_length=1, max_length=128)
    cache_salt: str | None = Field(default=None, min_length=1, max_length=128)
    """Prompts share cached prefixes only with prompts of the same salt."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None

    @model_validator(mode="after")
    def _check_streaming(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise refused("stream_options", "stream_options needs stream=true")
        return self


class GenerationRequest(StreamableRequest):
    """The fields that completions and chats share; names and meanings are OpenAI's and vLLM's."""

    others = OTHER_NAMES["SamplingParams"] | OTHER_NAMES["requests"]
    ignored = IGNORED
    empty_is_absent = frozenset(["model", "user", "response_format", "stream_options"])

    n: Annotated[int, Field(ge=1, le=128)] | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | Annotated[list[ShortText], _FEW] | None = None
    stop_token_ids: Annotated[list[int], _MANY] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    bad_words: BadWords | None = None
    allowed_token_ids: Annotated[list[int], Field(max_length=65536, fail_fast=True)] | None = None
    logit_bias: Annotated[dict[str, float], _MANY_KEYS] | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: int | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: Annotated[list[str], _MANY] | None = None
    guided_grammar: str | None = None
    vllm_xargs: Annotated[dict[str, Any], Field(max_length=64)] | None = None
    """`SamplingParams.extra_args`: values for the logits rules that the server was given."""
    return_tokens_as_token_ids: bool | None = None

    def without_large_fields(self) -> Self:
        """Return a copy for the time of the answer; to read a field that it lacks is an error."""
        light = self.model_copy()
        for name in _LARGE_FIELDS:
            vars(light).pop(name, None)
        return light

    def forms(self) -> dict[str, dict[str, Any]]:
        """Return what the answer must fit, by vLLM's names, for each field that says it."""
        found = {"structured_outputs": self.structured_outputs} if self.structured_outputs else {}
        for name, kind in _GUIDED.items():
            if (value := getattr(self, name)) is not None:
                found[name] = {kind: value}
        match self.response_format:
            case ResponseFormat(type="json_object"):
                found["response_format"] = {"json_object": True}
            case ResponseFormat(type="json_schema", json_schema=JSONSchema() as schema):
                found["response_format"] = schema.form()
        return found

    @model_validator(mode="after")
    def _check_form(self) -> Self:
        if len(self.forms()) > 1:
            first, second, *_ = self.forms()
            raise refused(second, f"{first} and {second} both say what to write: give one")
        return self


MAX_PROMPTS = 4096

TokenIds = Annotated[list[int], Field(fail_fast=True, min_length=1)]


def _prompt_kind(value: Any) -> str | None:
    """Return which of the four forms a prompt has, by its first element; None if it has none."""
    first = value[0] if isinstance(value, list) and value else None
    if isinstance(first, str):
        return "texts"
    if isinstance(first, list):
        return "token_id_lists"
    if isinstance(value, list):
        return "token_ids"
    return "text" if isinstance(value, str) else None


_Many = Field(fail_fast=True, min_length=1, max_length=MAX_PROMPTS)
Prompts = Annotated[
    Annotated[str, Tag("text")]
    | Annotated[list[str], _Many, Tag("texts")]
    | Annotated[TokenIds, Tag("token_ids")]
    | Annotated[list[TokenIds], _Many, Tag("token_id_lists")],
    Discriminator(_prompt_kind, custom_error_type="kind", custom_error_message=STRING_OR_LIST),
]


class CompletionRequest(GenerationRequest):
    prompt: Prompts
    """A text, a list of texts, token ids, or a list of such lists."""
    echo: bool | None = None
    """Begin the answer with the prompt; with logprobs, its log-probabilities too."""
    logprobs: int | None = None
    """How many of the most likely tokens to return for each token."""
    best_of: int | None = None
    suffix: str | None = None

    @model_validator(mode="after")
    def _check_unsupported(self) -> "CompletionRequest":
        if self.best_of not in (None, self.n or 1):
            raise refused("best_of", f"best_of={self.best_of} is not supported: use n")
        if self.suffix:
            raise refused("suffix", "suffix is not supported: the models continue a text only")
        return self


def usage(num_prompt: int, num_output: int, num_cached: int) -> dict[str, Any]:
    """Return how many tokens a request took; `num_cached` of the prompt's were in the cache."""
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": {"cached_tokens": num_cached},
    }


MAX_VALUES = 2**15
"""JSON values in the schemas of a request's tools: each is looked at."""
MAX_ITEMS = 4096
MAX_CALLS = 128
ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.:/-]{1,128}$")]


def check_size(schemas: Iterable[Any], field: str) -> None:
    """Refuse schemas that have too many values in all.

    Args:
        field: that of the model which has them.

    Raises:
        PydanticCustomError: it says how many values there may be.
    """
    unread = list(schemas)
    num_values = len(unread)
    while unread:
        value = unread.pop()
        if isinstance(value, dict | list):
            num_values += len(value)
            if num_values > MAX_VALUES:
                raise refused(
                    field,
                    f"the schemas of tools have more than {MAX_VALUES} values: send fewer tools, "
                    "or simpler ones",
                )
            unread += value.values() if isinstance(value, dict) else value


_KEYWORDS: dict[str, tuple[type, str]] = {
    **dict.fromkeys(("allOf", "anyOf", "oneOf", "prefixItems"), (list, "a list of schemas")),
    **dict.fromkeys(("properties", "patternProperties"), (dict, "an object of schemas")),
    **dict.fromkeys(("$defs", "definitions"), (dict, "an object of schemas")),
    "enum": (list, "a list of values"),
    "$ref": (str, 'a text such as "#/$defs/name"'),
}
"""What the value of each keyword must be, unless it is empty."""


_MAX_SHOWN = 200


def check_keywords(schema: Any, field: str) -> None:
    """Refuse a tool's schema with a keyword whose value has the wrong type."""
    # A place is the steps that lead to it: long names are not copied.
    unread: list[tuple[tuple[str, ...], Any]] = [((field,), schema)]
    while unread:
        place, part = unread.pop()
        for key, value in part.items() if isinstance(part, dict) else ():
            at = (*place, f".{key:.80}")
            kind, rule = _KEYWORDS.get(key, (object, ""))
            is_right = isinstance(value, kind)
            if key == "type":
                rule = 'the name of a type such as "string", or a list of them'
                names = value if isinstance(value, list) else [value]
                is_right = all(isinstance(name, str) for name in names)
            if value and not is_right:
                where = "".join(at)
                if len(where) > _MAX_SHOWN:
                    where = f"{where[:80]}...{where[-80:]}"
                raise refused(where, f"{where} must be {rule}, got {shown(value)}")
            if kind is dict and value:
                unread += [((*at, f".{name:.80}"), each) for name, each in value.items()]
            elif rule == "a list of schemas" and value:
                unread += [((*at, f"[{index}]"), each) for index, each in enumerate(value)]
            elif key in ("items", "additionalProperties", "not"):
                unread.append((at, value))


class Tool(RequestModel):
    """A function that the model may call."""

    schema_field: ClassVar[str] = "parameters"
    """What the request calls the schema of the arguments."""

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @cached_property
    def types(self) -> ParameterTypes:
        """The types of the parameters; answers of one request share what was found."""
        return ParameterTypes(self.parameters)

    @model_validator(mode="after")
    def _check_parameters(self) -> Self:
        check_size([self.parameters], self.schema_field)
        check_keywords(self.parameters, self.schema_field)
        return self


class ChatTool(RequestModel):
    type: Literal["function"]
    function: Tool


ChatTools = Annotated[list[ChatTool], Field(max_length=128, fail_fast=True)]


class FunctionName(RequestModel):
    name: str


class NamedToolChoice(RequestModel):
    type: Literal["function"] = "function"
    function: FunctionName


class SentBack(RequestModel):
    """A part of an earlier answer. What client libraries add to it is dropped, and so is what is
    empty: it means what null does.
    """

    @model_validator(mode="before")
    @classmethod
    def _check_names(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        known = cls.model_fields.keys()
        return {name: v for name, v in given.items() if name in known and not is_empty(v)}


class EarlierFunction(SentBack):
    name: str
    arguments: str | dict[str, Any] | None = None
    """A JSON text; one that is not an object is passed on as it is."""


class EarlierCall(SentBack):
    id: str | None = None
    type: Literal["function"] = "function"
    function: EarlierFunction


class Message(RequestModel):
    """A message of a conversation. The chat template reads further fields where it knows them."""

    model_config = ConfigDict(extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | Objects | None = None
    name: str | None = None
    tool_calls: list[EarlierCall] | None = Field(default=None, max_length=MAX_CALLS, fail_fast=True)
    tool_call_id: str | None = None
    function_call: EarlierFunction | None = None
    """OpenAI's form before there were tools."""
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _check_names(cls, given: Any) -> Any:
        """Let every field pass, but for empty ones that mean what null does."""
        if not isinstance(given, dict):
            return given
        return {name: v for name, v in given.items() if not counts_as_absent(name, v)}


Messages = Annotated[
    list[Message],
    Field(min_length=1, max_length=MAX_ITEMS, fail_fast=True),
    few_in_all("tool_calls", "tool_calls", MAX_ITEMS),
]


class ConversationRequest(GenerationRequest):
    """The fields that chats and responses share."""

    others = GenerationRequest.others | other_names(
        {"chat_template": (), "add_special_tokens": (False,)}
    )

    text_form: ClassVar[str] = "response_format"
    """The field that says what form the text must have; an answer of calls has none."""

    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None
    """False leaves the reasoning out of the answer."""
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def functions(self) -> list[Tool]:
        """The tools that the answer may call."""
        raise NotImplementedError

    @property
    def choice(self) -> ToolChoice:
        """Whether it may or must call them."""
        raise NotImplementedError

    @property
    def may_repeat(self) -> bool:
        """Whether the answer may have several calls."""
        return self.parallel_tool_calls is not False

    @model_validator(mode="after")
    def _check_size_of_tools(self) -> Self:
        check_size((tool.parameters for tool in self.functions), "tools")
        return self

    @model_validator(mode="after")
    def _check_one_form(self) -> Self:
        """Refuse a form of the answer, not only of its text, next to a tool that must be called."""
        for field in self.forms().keys() - {self.text_form}:
            if self.choice not in ("none", "auto"):
                message = f'tool_choice and {field} both say what to write: give one, or "auto"'
                raise refused(field, message)
        return self


class ChatRequest(ConversationRequest):
    others = ConversationRequest.others | other_names(
        {
            "functions function_call": ([], "none"),
            "modalities": (["text"],),
            "echo": (False,),
            "verbosity": ("medium",),
        }
    )
    empty_is_absent = GenerationRequest.empty_is_absent | {
        *("tools", "tool_choice", "reasoning_effort", "documents")
    }

    messages: Messages
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: ChatTools | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    reasoning_effort: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    documents: Objects | None = None

    @property
    def functions(self) -> list[Tool]:
        return [] if self.tool_choice == "none" else [tool.function for tool in self.tools or ()]

    @property
    def choice(self) -> ToolChoice:
        given = self.tool_choice
        return given.function if isinstance(given, NamedToolChoice) else given or "auto"

    @model_validator(mode="after")
    def _check_fields(self) -> "ChatRequest":
        if self.top_logprobs and not self.logprobs:
            raise refused("top_logprobs", "top_logprobs needs logprobs=true")
        if self.tool_choice not in (None, "none", "auto") and self.tools is None:
            raise refused("tool_choice", "tool_choice needs tools")
        return self
