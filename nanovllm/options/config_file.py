"""The YAML file of `--config`, whose keys are flags, as in vLLM."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanovllm.errors import ConfigError
from nanovllm.options.validation import shown

if TYPE_CHECKING:
    from nanovllm.options.flags import Parser


def with_file(words: Sequence[str], parser: "Parser") -> list[str]:
    """Return a command's words with the flags of its file in the place of `--config FILE`.

    What the command line has itself, the file does not change.

    Raises:
        ConfigError: the file cannot be read, or has no options.
    """
    flags = [word.partition("=")[0] for word in words]
    if "--config" not in flags:
        return list(words)
    place = flags.index("--config")
    path, *rest = [words[place].partition("=")[2] or None, *words[place + 1 :]]
    if path is None and rest:
        path, *rest = rest
    if any(word and not word.startswith("-") for word in (words[0], *rest[:1])):
        flags.append("--model")
    found = list(words[:place])
    for name, value in _read(path or "").items():
        flag = f"--{str(name).replace('_', '-')}"
        if flag not in flags:
            found += _words(flag, value, parser)
    return [*found, *rest]


def _read(path: str) -> dict[Any, Any]:
    import yaml  # type: ignore[import-untyped]  # few commands need it

    try:
        options = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"config {shown(path)} cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"config {shown(path)} is not YAML: {reason}") from None
    if not isinstance(options, dict):
        raise ConfigError(f"config {shown(path)} has no options, such as max-model-len: 4096")
    return options


def _words(flag: str, value: Any, parser: "Parser") -> list[str]:
    if value is None:
        return []
    if isinstance(value, bool):
        off = f"--no-{flag[2:]}"
        return [off if not value and off in parser._option_string_actions else flag]
    is_several = isinstance(value, list) and parser.is_repeated(flag)
    values = value if is_several else [value]
    texts = [each if isinstance(each, str) else json.dumps(each, default=str) for each in values]
    return [f"{flag}={text}" for text in texts]
