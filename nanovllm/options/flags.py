"""Command-line flags made from the fields of a dataclass: name, type, default and help; and what
commands share.

The help of a flag is the docstring below the field.
"""

import argparse
import ast
import contextlib
import dataclasses
import decimal
import functools
import inspect
import json
import re
import sys
import textwrap
import types
import typing
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn, TypeAlias

from nanovllm.errors import ConfigError, NanoVLLMError, ServerError
from nanovllm.options.config import Config
from nanovllm.options.other_names import OTHER_NAMES, REMEDIES, OtherName
from nanovllm.options.sampling_params import CHAT_SAMPLING, SamplingParams
from nanovllm.options.validation import did_you_mean, shown

UNITS = {"B": 1} | {
    unit: base**power
    for power, letter in enumerate("KMGT", 1)
    for unit, base in ((f"{letter}IB", 1024), (letter, 1024), (f"{letter}B", 1000))
}
"""Bytes of the units of a size, in capitals. A letter alone is a power of 1024, as in systemd; a
small one is none, because it is a power of 1000 in vLLM."""

COUNT_UNITS = {
    letter: base**power
    for base, letters in ((1000, "kmgt"), (1024, "KMGT"))
    for power, letter in enumerate(letters, 1)
}
"""What the letter at the end of a number stands for, as in vLLM: 8k is 8000, and 8K is 8192."""

TEXTS = (Sequence[str], tuple[str, ...])
"""The types of fields whose flag is given once for each text, or with a list in JSON."""

JOINED = ("served_model_name",)
"""Fields that hold several names with commas between."""

SHORT_FLAGS = {
    "tensor_parallel_size": "-tp",
    "pipeline_parallel_size": "-pp",
    "data_parallel_size": "-dp",
    "enable_expert_parallel": "-ep",
    "quantization": "-q",
    "optimization_level": "-O",
    "compilation_config": "-cc",
    "speculative_config": "-sc",
}
"""By option: vLLM's short flag."""


MAX_TOKENS = 512
"""max_tokens if neither a flag nor the checkpoint sets it."""
RECOMMENDED = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_tokens")
"""The fields of SamplingParams that a checkpoint may set."""

Subparsers: TypeAlias = "argparse._SubParsersAction[Parser]"
Command = Callable[[argparse.Namespace], int]
"""Runs with the parsed arguments, and returns the exit status. Its docstring is the help."""


class DashingParser(argparse.ArgumentParser):
    """An argument parser whose flags may have underscores where their names have dashes."""

    def parse_known_args(  # type: ignore[override]  # which has overloads
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Return the arguments, as argparse does, with dashes for the underscores in flags."""
        words = sys.argv[1:] if args is None else list(args)
        if self._subparsers is None:  # otherwise the parser of the command does it
            end = words.index("--") if "--" in words else len(words)
            words = [*self._spelled(words[:end]), *words[end:]]
        return super().parse_known_args(words, namespace)

    def _spelled(self, words: Sequence[str]) -> list[str]:
        """Return words as this parser knows them."""
        return list(map(self._with_dashes, words))

    def _with_dashes(self, word: str) -> str:
        flag, equals, value = word.partition("=")
        if not flag.startswith("--"):
            return word
        dashed = f"--{flag[2:].replace('_', '-')}"
        known = self._option_string_actions
        return f"{dashed}{equals}{value}" if flag not in known and dashed in known else word


class Parser(DashingParser):
    """An argument parser that raises its errors; flags cannot be abbreviated."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)
        self.elsewhere: Mapping[str, str] = {}
        """What to use instead of a command of other programs."""
        self._common: Collection[str] = ()
        self._examples: Sequence[str] = ()
        self.takes_lists = False
        """Whether all words behind a flag of several values are its own, as in vLLM, where a MODEL
        stands before it. Otherwise only the first one is, and the others are what they are."""

    def _spelled(self, words: Sequence[str]) -> list[str]:
        """Return words as this parser knows them: a flag before each of its values."""
        found: list[str] = []
        repeated = ""
        words = super()._spelled(words)
        names_model = not words[0].startswith("-") if words else False
        for word in words:
            flag = word.partition("=")[0]
            if word.startswith("-"):
                names_model |= flag == "--model"
                takes_list = self.takes_lists and names_model and self.is_repeated(flag)
                repeated = flag if takes_list else ""
            elif repeated and found[-1] != repeated:
                found.append(repeated)
            found.append(word)
        return found

    def is_repeated(self, flag: str) -> bool:
        """Return whether a flag is given once for each of its values."""
        return isinstance(self._option_string_actions.get(flag), argparse._AppendAction)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (see {self.prog} --help)")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Raise ConfigError for a command that is not known, and suggest the one that was meant."""
        if action.choices is not None and value not in action.choices:
            hint = did_you_mean(value, list(action.choices))
            if value in self.elsewhere:
                hint = f": {self.elsewhere[value]}"
            self.error(f"there is no command {shown(f'{self.prog} {value}')}{hint}")

    def words(self, rest: list[str]) -> list[str]:
        """Return the words among the arguments that argparse left over; refuse a flag.

        Words are what follows "--", and texts such as "-5" or "- milk".
        """
        end = rest.index("--") if "--" in rest else len(rest)
        for word in rest[:end]:
            if re.match(r"(--\w|-[^\W\d])[^\s=]*(=|$)", word):
                self.refuse_flag(word)
        return rest[:end] + rest[end + 1 :]

    def refuse_flag(self, word: str) -> NoReturn:
        """Raise ConfigError for a flag that is not known, and suggest the one that was meant."""
        name = word.partition("=")[0]
        field = name.lstrip("-").replace("-", "_")
        if remedy := REMEDIES.get(name) or REMEDIES.get(field):
            self.error(f"there is no flag {name:.80}: {in_flags(remedy, self)}")
        known = {
            flag[2:].replace("-", "_"): flag
            for flag, action in self._option_string_actions.items()
            if flag.startswith("--") and action.help != argparse.SUPPRESS
        }
        hint = did_you_mean(field, known)
        meant = known.get(hint.partition("'")[2].removesuffix("'?"))  # None: it lists them all
        self.error(f"there is no flag {name:.80}" + (f"; did you mean '{meant}'?" if meant else ""))

    @contextlib.contextmanager
    def errors_in_flags(self) -> Iterator[None]:
        """Let the errors of this library name flags; a server's errors stay as they are."""
        try:
            yield
        except ServerError:
            raise
        except NanoVLLMError as error:
            raise type(error)(in_flags(str(error), self)) from error

    def format_help(self) -> str:
        """Return the help, in which flags have their own spelling."""
        for action in self._actions:
            action.help = action.help and in_flags(action.help, self)
        if not self._common:
            return super().format_help()
        formatter = self._get_formatter()
        formatter.add_usage(self.usage, self._actions, [])
        formatter.add_text(self.description)
        found = {action.dest: action for action in self._actions if action.option_strings}
        common = [found[name] for name in (*self._common, "help_all")]
        for title, actions in (("arguments", self._get_positional_actions()), ("flags", common)):
            formatter.start_section(title)
            formatter.add_arguments(actions)
            formatter.end_section()
        formatter.add_text(self.epilog)
        examples = "".join(f"  {line}\n" for line in self._examples)
        return formatter.format_help() + f"\nexamples:\n{examples}" * bool(examples)

    def shorten_help(self, common: Collection[str], *examples: str) -> None:
        """Let --help show these flags and examples alone, and --help-all every flag."""
        self._common = common
        self._examples = examples
        self.add_argument("--help-all", action=_HelpAll, help="Show all flags, not only these.")


class _HelpAll(argparse._HelpAction):
    """Shows every flag, and ends."""

    def __call__(self, parser: argparse.ArgumentParser, *args: Any) -> None:
        assert isinstance(parser, Parser)
        parser._common = ()
        super().__call__(parser, *args)


class _Field(NamedTuple):
    """What a flag needs to know of a field."""

    kind: Any  # the type, without None
    default: Any


@functools.cache
def fields_of(owner: type) -> Mapping[str, _Field]:
    """Return the fields that can be written on a command line, by name."""
    hints = typing.get_type_hints(owner)
    found = {}
    for field in dataclasses.fields(owner):
        kind = hints[field.name]
        if isinstance(kind, types.UnionType):
            kinds = [  # a dataclass can be written as a dictionary
                arg
                for arg in typing.get_args(kind)
                if arg is not type(None) and not dataclasses.is_dataclass(arg)
            ]
            kind = kinds[0] if len(kinds) == 1 else kind
        if _is_plain(kind):
            found[field.name] = _Field(kind, field.default)
    return found


def add_flags(
    group: "argparse._ActionsContainer",
    owner: type,
    *,
    but: Collection[str] = (),
    defaults: Mapping[str, str] | None = None,
) -> None:
    """Add a flag for each field of `owner` except those in `but`.

    A flag that is not given sets no attribute, so the field's default stands.

    Args:
        defaults: what the help says of defaults that are not the field's own, by field.
    """
    docs = _field_docs(owner)
    for name, field in fields_of(owner).items():
        if name in but:
            continue
        options: dict[str, Any] = {"default": argparse.SUPPRESS, "dest": name}
        if field.kind is bool:
            options["action"] = argparse.BooleanOptionalAction
        elif field.kind in TEXTS or name in JOINED:
            options |= {"action": "extend", "type": _texts, "metavar": "TEXT"}
        elif field.kind is str:
            options["metavar"] = "TEXT"
        elif field.kind is int and name.endswith("_bytes"):
            options |= {"type": _size, "metavar": "SIZE"}
        elif field.kind is float and name.endswith("_gib"):
            options |= {"type": _gib, "metavar": "GIB"}
        elif field.kind in (int, float):
            options |= {"type": _number(field.kind), "metavar": field.kind.__name__.upper()}
        else:
            options |= {"type": json_value, "metavar": "JSON"}
        help_text = _help(docs.get(name, ""), field, (defaults or {}).get(name), options)
        group.add_argument("--" + name.replace("_", "-"), help=help_text, **options)


def add_other_flags(
    group: "argparse._ActionsContainer", *, default: Any, is_server: bool = False
) -> None:
    """Add a flag, hidden from help, for each of vLLM's options that has none; and its short flags.

    A flag that asks for what happens anyway is taken; any other ends with an error that says what
    to use.

    Args:
        default: the value in the namespace where the flag is not given.
        is_server: whether the names of vLLM's server are flags too.
    """
    of_server = OTHER_NAMES["ServerOptions"] if is_server else {}
    known = group._option_string_actions
    for name, other in {**OTHER_NAMES["Config"], **of_server}.items():
        flags = [_flag(name)]
        if any(isinstance(value, bool) for value in other.accepted):
            flags.append(_flag(f"no_{name}"))
        if known.keys().isdisjoint(flags):
            group.add_argument(
                *flags,
                action=_OtherFlag,
                other=other,
                nargs=0 if len(flags) == 2 else None,
                dest=name,
                default=default,
                help=argparse.SUPPRESS,
            )
    for name, short in SHORT_FLAGS.items():
        if action := known.get(_flag(name)):
            known.setdefault(short, action)


class _OtherFlag(argparse.Action):
    """Checks the value of a flag of vLLM's."""

    def __init__(self, *args: Any, other: OtherName, **options: Any) -> None:
        super().__init__(*args, **options)
        self._other = other

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        flag = option_string or self.option_strings[0]
        value = (
            _json_or_text(values) if isinstance(values, str) else flag != self.option_strings[-1]
        )
        if not self._other.accepts(value):
            given = f"{flag} {shown(values)[1:-1]}" if isinstance(values, str) else flag
            remedy = in_flags(self._other.remedy or "", parser)
            parser.error(f"{given} is not supported: {remedy}")
        setattr(namespace, self.dest, value)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _json_or_text(text: str) -> Any:
    """Return the JSON value of a flag's text, or the text if it is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None if text == "None" else text


def in_flags(text: str, parser: argparse.ArgumentParser) -> str:
    """Return `text` with its names of fields as flags: `--device cpu` for `device="cpu"`.

    A name that is also an English word is one where "=", " must" or a quote follows it. What
    stands in quotes is the user's.
    """
    actions = [action for action in reversed(parser._actions) if action.option_strings]
    spellings = {action.dest: action.option_strings for action in actions}  # the first counts
    long = [re.escape(name) for name in spellings if "_" in name]
    short = [rf"{re.escape(name)}(?==| must\b| ['\"])" for name in spellings if "_" not in name]
    names = rf"(?<![\w./-])({'|'.join(long + short)})\b(?!\.\w|/)"
    quoted = r"""(?<!\w)'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\""""
    value = r"""=(True\b|False\b|"[^"\s]+"|'[^'\s]+'|\d[\d.]*(?<!\.))"""

    def spell(match: re.Match[str]) -> str:
        if match[1] is None:
            return match[0]
        on, *off = spellings[match[1]]
        if match[2] in ("True", "False") and off:
            return on if match[2] == "True" else off[-1]
        return " ".join([on, (match[2] or "").strip("\"'")]).rstrip()

    return re.sub(rf"{quoted}|{names}(?:{value})?", spell, text)


def given_fields(owner: type, args: argparse.Namespace) -> dict[str, Any]:
    """Return the values of the flags that were given for the fields of `owner`."""
    given = vars(args)
    found = {name: given[name] for name in fields_of(owner) if name in given}
    return found | {name: ",".join(found[name]) for name in JOINED if name in found}


def json_value(text: str) -> Any:
    """Return the value of a JSON text; the error says where the text breaks off from JSON."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        reason = f"{error.msg} at character {error.pos + 1} of"
    except (ValueError, RecursionError):  # a number of thousands of digits; thousands of brackets
        reason = "too large or nested too deeply:"
    raise argparse.ArgumentTypeError(f"not JSON: {reason} {shown(text)}")


def json_object(text: str) -> dict[str, Any]:
    """Return the dictionary of a JSON text."""
    value = json_value(text)
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f'not a JSON object, such as {{"a": 1}}: {shown(text)}')
    return value


def _texts(text: str) -> list[str]:
    """Return the texts of a list in JSON, such as ["a", "b"], or the text alone."""
    value = _json_or_text(text)
    is_list = isinstance(value, list) and all(isinstance(item, str) for item in value)
    return value if is_list else [text]


_NONE = re.compile(r" None(?: is |: | (?:disables|writes|returns) \w+\.$)(.*)$", re.DOTALL)
"""The end of a docstring that says what None stands for; it is "off" where None turns it off."""


def _help(doc: str, field: _Field, default: str | None, options: Mapping[str, Any]) -> str:
    """Return the help of a flag: the field's docstring, and the default in words.

    What the docstring calls None at its end ("None is X.", "None: X.", "None disables it.") is the
    default of a flag not given; if the default is another one, it is left out, because no flag can
    say None.
    """
    none = ""
    if found := _NONE.search(doc):
        doc = doc[: found.start()]
        none = found[1] or "off"
    if default is None:
        match field.default:
            case None:
                default = none.rstrip(".")
            case bool(value):
                default = "on" if value else "off"
            case ():
                default = "none"
            case int(value) if options.get("metavar") == "SIZE" and value % 2**20 == 0:
                default = f"{value // 2**20}MiB"
            case value:
                default = f"{value:g}" if isinstance(value, float) else str(value)
    if doc.endswith(";"):
        doc = doc[:-1] + "."
    if options.get("metavar") in ("SIZE", "GIB"):
        doc += " It may have a unit, as in 512MiB."
    if options.get("action") == "extend":
        doc += " The flag may be repeated."
    return (f"{doc} (default: {default})" if default else doc).strip().replace("%", "%%")


def _size(text: str, plain: str = "bytes") -> int:
    """Return the bytes of a size such as 1048576, 512MiB or 4 GB.

    Args:
        plain: what a number without a unit counts, for the error.
    """
    with contextlib.suppress(ValueError):
        return int(text)
    found = re.fullmatch(r"([0-9]{1,19}(?:\.[0-9]{1,19})?) ?([A-Za-z]{1,3})", text.strip())
    factor = UNITS.get(found[2] if len(found[2]) == 1 else found[2].upper()) if found else None
    if found is None or factor is None:
        rule = f"must be a number of {plain}, or have a unit, as in 512MiB or 4GiB"
        raise argparse.ArgumentTypeError(f"{rule}; got {shown(text)}")
    return int(decimal.Decimal(found[1]) * factor)


def _gib(text: str) -> float:
    """Return the GiB of a size such as 512MiB; a number without a unit counts GiB."""
    try:
        return float(text)
    except ValueError:
        return _size(text, "GiB") / 2**30


def _number(kind: type[int] | type[float]) -> Callable[[str], int | float]:
    def parse(text: str) -> int | float:
        try:
            found = re.fullmatch(r"(\d+(?:\.\d+)?)([kmgt])|(\d+)([KMGT])", text.strip())
            if found and kind is int:
                number = decimal.Decimal(found[1] or found[3])
                return int(number * COUNT_UNITS[found[2] or found[4]])
            return kind(text)
        except ValueError:
            what = "an integer" if kind is int else "a number"
            raise argparse.ArgumentTypeError(f"must be {what}, got {shown(text)}") from None

    return parse


def _is_plain(kind: Any) -> bool:
    """Return whether JSON can hold a value of this type; it cannot hold a function."""
    if kind in (str, int, float, bool, type(None), Any, Ellipsis):
        return True
    outer = typing.get_origin(kind)
    plain = outer in (tuple, list, dict, Mapping, Sequence, types.UnionType)
    return plain and all(map(_is_plain, typing.get_args(kind)))


@functools.cache  # reading the source takes longer than all else that a command does
def _field_docs(owner: type) -> Mapping[str, str]:
    """Return the string below each field in the source, by field."""
    docs: dict[str, str] = {}
    for base in reversed(owner.__mro__[:-1]):
        try:
            body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]
        except OSError:  # installed without its source
            continue
        assert isinstance(body, ast.ClassDef)
        for field, below in zip(body.body, body.body[1:], strict=False):
            match field, below:
                case (
                    ast.AnnAssign(target=ast.Name(id=name)),
                    ast.Expr(value=ast.Constant(value=str() as text)),
                ):
                    docs[name] = " ".join(text.split())
    return docs


def add_command(
    commands: Subparsers,
    run: Command,
    words: str,
    takes: str,
    more: str | None = None,
    aliases: Sequence[str] = (),
) -> Parser:
    """Add a command, named as the function that runs it; return its parser.

    Args:
        words: what follows the name, for the help.
        takes: for the error of a word too many, such as "models takes one MODEL".
        more: what the help says at its end.
        aliases: other names of the command.
    """
    prog = commands._prog_prefix
    parser = commands.add_parser(
        run.__name__,
        aliases=aliases,
        help=run.__doc__,
        description=run.__doc__,
        epilog=more,
        usage=f"{prog} {run.__name__} {words}",
    )
    parser.set_defaults(command=run, parser=parser, takes=takes)
    return parser


def add_own_and_engine_flags(
    parser: Parser, groups: Mapping[str, tuple[type, Collection[str]]], *common: str
) -> None:
    """Add a command's own flags, which --help shows, and those of the engine.

    Args:
        groups: by title: the class whose fields are flags, and those that are left out.
        common: further flags that --help shows.
    """
    shown = list(common)
    for title, (owner, left_out) in groups.items():
        add_flags(parser.add_argument_group(title), owner, but=left_out)
        shown += [name for name in fields_of(owner) if name not in left_out]
    add_engine_flags(parser)
    add_other_flags(parser, default=argparse.SUPPRESS)  # after the flags that they may name
    parser.shorten_help(shown)


def add_engine_flags(parser: Parser, defaults: Mapping[str, str] | None = None) -> None:
    """Add a flag for each field of Config. `defaults` is that of `add_flags`."""
    add_flags(parser.add_argument_group("engine"), Config, but={"model"}, defaults=defaults)


def add_sampling_flags(
    parser: Parser, *, is_chat: bool | None = False, defaults: Mapping[str, str] | None = None
) -> None:
    """Add a flag for each field of SamplingParams that Config does not have.

    Args:
        is_chat: whether the defaults that the help names are those of chats; None if a flag
            --chat decides.
        defaults: that of `add_flags`, where it is not that of chats and completions.
    """
    own = {name: field.default for name, field in fields_of(SamplingParams).items()}
    own["max_tokens"] = MAX_TOKENS
    helps = {name: f"the checkpoint's, or else {own[name]}" for name in RECOMMENDED}
    for name, value in CHAT_SAMPLING.items():
        if is_chat:
            helps[name] = f"the checkpoint's, or else {value}"
        elif is_chat is None:
            helps[name] += f"; {value} with --chat"
    group = parser.add_argument_group("sampling")
    add_flags(group, SamplingParams, but=fields_of(Config), defaults=helps | dict(defaults or {}))
