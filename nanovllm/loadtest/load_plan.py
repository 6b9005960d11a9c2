"""What `nanovllm bench serve` asks of a server: its flags, and the requests that they describe.

Draws every prompt, length and time of arrival before the load begins. Sends nothing.
"""

import argparse
import dataclasses
import math
import random
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

from nanovllm.errors import ConfigError
from nanovllm.options.flags import Parser, add_flags
from nanovllm.options.validation import check_fields, check_float, check_int, shown

COMPLETIONS, CHAT_COMPLETIONS = "/v1/completions", "/v1/chat/completions"
TOKEN_IDS = range(256, 1000)
"""The tokens of random prompts: text in nearly every vocabulary, where special tokens and single
bytes come before or at the end."""
TEXT = (
    "the of and to in that was for on are with as at be this have from or one had by word but not "
    "what all were we when your can said there use an each which she do how their if will up other "
    "about out many then them these so some her would make like him into time has look two more"
)
"""The words of random messages; each is one token in large vocabularies."""
LATENCIES = ("ttft", "tpot", "e2el")
"""What a goodput may limit."""


@dataclasses.dataclass(frozen=True)
class LoadPlan:
    """The flags of `nanovllm bench serve`; names are vLLM's where it has them.

    Raises:
        ConfigError: a value is out of range, or contradicts another.
    """

    url: str | None = None
    """URL of the server; None is http://HOST:PORT."""
    host: str = "127.0.0.1"
    """The server's host, if no URL is given."""
    port: Annotated[int, check_int, 1, 65535] = 8000
    """The server's port, if no URL is given."""
    api_key: str | None = None
    """The server's API key; None is the environment variable OPENAI_API_KEY, if it is set."""
    model: str | None = None
    """The model's name at the server; None is the server's first."""
    endpoint: str = COMPLETIONS
    """/v1/completions gets prompts of token ids, /v1/chat/completions messages of words; another
    endpoint is treated as the one whose name it ends with."""
    num_prompts: Annotated[int, check_int, 1] = 1000
    """Number of requests; with --num-turns, of conversations."""
    request_rate: float = math.inf
    """Requests, or conversations, that begin each second; inf begins all at once."""
    burstiness: float = 1.0
    """Shape of the gamma distribution of the time between arrivals: 1 is a Poisson process, below 1
    has more bursts, above 1 is more even."""
    max_concurrency: Annotated[int | None, check_int, 1] = None
    """Maximum number of requests at once; those above it wait here. None is no limit."""
    random_input_len: Annotated[int, check_int, 1] = 1024
    """Tokens of a prompt after the shared prefix, or words of a message."""
    random_output_len: Annotated[int, check_int, 1] = 128
    """Maximum number of tokens to generate for a request."""
    random_range_ratio: float = 0.0
    """Lengths are drawn evenly from LEN * (1 - ratio) to LEN * (1 + ratio); at least 0, below 1."""
    random_prefix_len: Annotated[int, check_int, 0] = 0
    """Tokens, or words, at the beginning of each prompt that prompts share."""
    num_prefixes: Annotated[int, check_int, 1] = 1
    """Number of different shared prefixes; requests take turns."""
    num_turns: Annotated[int, check_int, 1] = 1
    """Messages of a conversation. Each is sent with the messages and answers before it, as soon as
    the last answer is there; it needs the endpoint /v1/chat/completions."""
    ignore_eos: bool = False
    """Ask the server to generate to the maximum length, as vLLM and nanovllm can."""
    temperature: float | None = None
    """Sampling temperature; None is the server's own."""
    extra_body: dict[str, Any] | None = None
    """Further fields of each request, such as {"top_k": 5}; None is none."""
    num_warmups: Annotated[int, check_int, 0] = 1
    """Requests of the same kind that are sent before, and not counted."""
    goodput: tuple[str, ...] = ()
    """Limits in milliseconds such as ttft:200 tpot:50 e2el:5000; goodput counts the requests that
    keep all of them."""
    seed: int = 0
    """Seed of prompts, lengths and arrivals."""
    save_result: str | None = None
    """JSON file to write, with vLLM's names and all single times; None is no file."""

    def __post_init__(self) -> None:
        check_fields(ConfigError, self)
        for name in ("request_rate", "burstiness"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be above 0, got {getattr(self, name)}")
        check_float(ConfigError, "burstiness", self.burstiness, 0)
        if not 0 <= self.random_range_ratio < 1:
            ratio = self.random_range_ratio
            raise ConfigError(f"random_range_ratio must be at least 0 and below 1, got {ratio}")
        if not self.endpoint.startswith("/") or not self.endpoint.endswith("completions"):
            raise ConfigError(
                f"endpoint must be like {COMPLETIONS} or {CHAT_COMPLETIONS}, "
                f"got {shown(self.endpoint)}"
            )
        if self.num_turns > 1 and not self.is_chat:
            raise ConfigError(f"num_turns above 1 needs --endpoint {CHAT_COMPLETIONS}")
        if self.extra_body is not None and not isinstance(self.extra_body, dict):
            raise ConfigError(f"extra_body must be a JSON object, got {shown(self.extra_body)}")
        self.limits()

    @property
    def is_chat(self) -> bool:
        return self.endpoint.endswith("/chat/completions")

    @property
    def server_url(self) -> str:
        return self.url or f"http://{self.host}:{self.port}"

    def limits(self) -> dict[str, float]:
        """Return the limits of goodput in milliseconds, by latency.

        Raises:
            ConfigError: one is written wrongly.
        """
        limits = {}
        for text in self.goodput:
            name, _, number = text.partition(":")
            try:
                limit = float(number)
            except ValueError:
                limit = math.nan
            if name not in LATENCIES or not 0 <= limit < math.inf:
                raise ConfigError(
                    f"goodput must be like ttft:200, with {', '.join(LATENCIES)} and milliseconds, "
                    f"got {shown(text)}"
                )
            limits[name] = limit
        return limits


class Conversation(NamedTuple):
    """A request, or several that follow each other."""

    arrival: float
    """Seconds after the load begins."""
    prompts: list[list[int] | str]
    """A prompt of token ids, or the user's messages."""
    output_lens: list[int]
    """Maximum number of tokens of each answer."""


def make_conversations(plan: LoadPlan) -> list[Conversation]:
    """Return the load, in the order of arrival."""
    rng = random.Random(plan.seed)
    arrivals = _arrivals(plan, rng)
    return _draw(plan, rng, arrivals)


def make_warmups(plan: LoadPlan) -> list[Conversation]:
    """Return the requests before the load: of the same lengths, and with prompts of their own."""
    rng = random.Random(f"warm-up {plan.seed}")
    one_turn = dataclasses.replace(plan, num_turns=1)
    return _draw(one_turn, rng, [0.0] * plan.num_warmups)


def add_bench(
    commands: "argparse._SubParsersAction[Parser]", bench: Callable[[argparse.Namespace], int]
) -> None:
    """Add `bench serve` with a flag for each field of LoadPlan."""
    usage = "nanovllm bench serve [flags]"
    parent = commands.add_parser("bench", help=bench.__doc__, usage=usage)
    parent.set_defaults(parser=parent)
    commands = parent.add_subparsers(metavar="serve", prog="nanovllm bench")
    parser = commands.add_parser(
        "serve", help=bench.__doc__, description=bench.__doc__, usage=usage
    )
    parser.set_defaults(command=bench, parser=parser, takes="bench serve takes flags only")
    group = parser.add_argument_group("flags")
    group.add_argument(
        "--url",
        "--base-url",  # vLLM's name
        default=argparse.SUPPRESS,
        help="URL of the server, such as http://127.0.0.1:8000. (default: http://HOST:PORT)",
    )
    add_flags(group, LoadPlan, but={"url", "goodput"}, defaults={})
    group.add_argument(
        "--goodput",
        nargs="+",
        default=argparse.SUPPRESS,
        metavar="NAME:MS",
        help="Limits of a request's latencies in milliseconds, such as ttft:200 tpot:50 e2el:5000. "
        "Goodput counts the requests that keep all of them. (default: none)",
    )


def _arrivals(plan: LoadPlan, rng: random.Random) -> list[float]:
    """Return seconds, scaled so that the last arrival is where the rate has it; as in vLLM."""
    if plan.request_rate == math.inf:
        return [0.0] * plan.num_prompts
    now, times = 0.0, []
    for _ in range(plan.num_prompts):
        now += rng.gammavariate(plan.burstiness, 1.0)
        times.append(now)
    scale = plan.num_prompts / plan.request_rate / (now or 1.0)
    return [time * scale for time in times]


def _draw(plan: LoadPlan, rng: random.Random, arrivals: list[float]) -> list[Conversation]:
    def length(mean: int) -> int:
        low = max(1, math.floor(mean * (1 - plan.random_range_ratio)))
        return rng.randint(low, math.ceil(mean * (1 + plan.random_range_ratio)))

    prefixes = [rng.choices(TOKEN_IDS, k=plan.random_prefix_len) for _ in range(plan.num_prefixes)]
    drawn = []
    for number, arrival in enumerate(arrivals):
        turns = [rng.choices(TOKEN_IDS, k=length(plan.random_input_len))]
        turns[0] = prefixes[number % len(prefixes)] + turns[0]
        for _ in range(plan.num_turns - 1):
            turns.append(rng.choices(TOKEN_IDS, k=length(plan.random_input_len)))
        prompts = [_words(turn) if plan.is_chat else turn for turn in turns]
        output_lens = [length(plan.random_output_len) for _ in turns]
        drawn.append(Conversation(arrival, prompts, output_lens))
    return drawn


def _words(token_ids: list[int]) -> str:
    words = TEXT.split()
    return " ".join(words[token % len(words)] for token in token_ids)
