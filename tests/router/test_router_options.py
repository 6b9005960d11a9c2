"""What the words of `nanovllm serve` say of several models."""

import contextlib
import dataclasses
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

pytest.importorskip("fastapi")

from nanovllm import demo_model
from nanovllm.apps.cli.arguments import parse
from nanovllm.apps.cli.main import chat, generate, run, serve
from nanovllm.apps.router.router_options import (
    ENGINE_FIELDS,
    ModelSpec,
    RouterOptions,
    names_several,
    read_models,
)
from nanovllm.apps.server.server_options import ServerOptions
from nanovllm.errors import ConfigError
from nanovllm.options.config import Config
from nanovllm.options.flags import given_fields


def specs(*words: str, **options: Any) -> list[ModelSpec]:
    of_server = {field.name for field in dataclasses.fields(ServerOptions)} & options.keys()
    server = {name: options.pop(name) for name in of_server}
    return read_models(words, options, server)


def table(tmp_path: Path, text: str) -> str:
    path = tmp_path / "models.toml"
    path.write_text(text)
    return str(path)


def test_words_name_models() -> None:
    found = specs("Qwen/Qwen3-0.6B", f"demo,gpt-4={demo_model.MODEL}", max_model_len=512)
    assert [spec.names for spec in found] == [("Qwen/Qwen3-0.6B",), ("demo", "gpt-4")]
    assert [spec.model for spec in found] == ["Qwen/Qwen3-0.6B", demo_model.MODEL]
    assert [spec.share for spec in found] == [0.45, 0.45]
    assert all(spec.engine == {"max_model_len": 512} for spec in found)


def test_a_table_has_options_of_its_own(tmp_path: Path) -> None:
    text = """
    [small]
    model = "Qwen/Qwen3-0.6B"
    aliases = ["gpt-3.5-turbo", "s"]
    max-model-len = 1024
    gpu_memory_utilization = 0.25
    lora_modules = ["sql=/adapters/sql"]
    enable_lora = true
    speculative_config = {method = "ngram", num_speculative_tokens = 3}
    [big]
    model = "Qwen/Qwen3-8B"
    """
    small, big = specs(table(tmp_path, text), max_model_len=2048, log_level="debug")
    assert small.names == ("small", "gpt-3.5-turbo", "s")
    assert small.adapters == ("sql",)
    assert (small.share, big.share) == (0.25, 0.45)
    assert big.engine == {"max_model_len": 2048}
    args = parse(small.words(), (generate, chat, run, serve))  # what its engine makes of them
    config = Config(**given_fields(Config, args))
    assert config.max_model_len == 1024
    assert config.enable_lora
    assert config.speculation.num_speculative_tokens == 3
    options = ServerOptions(**given_fields(ServerOptions, args))
    assert options.served_model_name == "small,gpt-3.5-turbo,s"
    assert options.lora_modules == ("sql=/adapters/sql",)
    assert options.log_level == "debug"


@pytest.mark.parametrize(
    ("words", "several"),
    [
        (["Qwen/Qwen3-0.6B"], False),
        (["a", "b"], True),
        (["a=b"], True),
        (["models.toml"], True),
        (["./dir=x/model"], False),
        ([], False),
    ],
)
def test_when_a_server_has_several(words: list[str], several: bool) -> None:
    assert names_several(words) == several


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[a]\nmodel = 3", r"\[a\]: model must be a string"),
        ("[a]\nmodle = 'x'", r"\[a\] lacks its model, such as model = "),
        ("[a]\nmodel = 'x'\nmax_modellen = 3", "'max_modellen'; did you mean 'max_model_len'"),
        ("[a]\nmodel = 'x'\nport = 3", "there is no option 'port'"),
        ("[a]\nmodel = 'x'\ntool_call_parser = 'hermess'", "model 'a': tool_call_parser must be"),
        (
            "[a]\nmodel = 'x'\nlora_directory = '/x'",
            "lora_directory='/x' is for adapters, but",
        ),
        ("[a]\nmodel = 'x'\nlora_directory = '/x'\nenable_lora = true", "'/x' is not a directory"),
        ("[a]\nmodel = 'x'\nmax_model_len = 0", "model 'a': max_model_len must be an integer"),
        ("[a]\nmodel = 'x'\n[b]\nmodel = 'y'\naliases = ['a']", "two models have the name 'a'"),
        ("[a]\nmodel = 'x'\naliases = ['b,c']", "'a,b,c' must have text and no comma"),
        ("a = 3", "'a' must be a table, such as"),
        ("", "names no model"),
        ("[a", "is not TOML"),
    ],
)
def test_a_wrong_table(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        specs(table(tmp_path, text))


def test_each_option_of_the_server_is_the_engines_or_the_routers() -> None:
    routers = {"host", "port", "uds", "api_keys", "cors_origins"}
    routers.add("dev_mode")  # which it refuses
    given = {"served_model_name", "enable_sleep_mode", "drain_seconds"}  # to its engines
    (spec,) = specs("x/y", max_connections=9, read_timeout=200, root_path="/llm")
    options = ServerOptions(**given_fields(ServerOptions, parse(spec.words(), (serve,))))
    assert (options.max_connections, options.read_timeout) == (18, 200)
    assert (options.root_path, options.drain_seconds) == ("/llm", 0)
    assert options.enable_sleep_mode
    both = {"max_connections", "read_timeout", "root_path"}
    fields = {field.name for field in dataclasses.fields(ServerOptions)}
    assert fields == {*ENGINE_FIELDS} | routers | given | both
    assert len(fields) == len(ENGINE_FIELDS) + len(routers) + len(given) + len(both)


def test_options_of_one_model_alone() -> None:
    assert specs("x/y", served_model_name="a,b")[0].names == ("a", "b")
    with pytest.raises(ConfigError, match="served_model_name is of one model: name several as"):
        specs("x/y", "x/z", served_model_name="a")
    with pytest.raises(ConfigError, match="dev_mode is of a server of one model"):
        specs("a=x/y", dev_mode=True)
    with pytest.raises(ConfigError, match="trace_file is the file of one engine"):
        specs("x/y", "x/z", trace_file="steps.json")


def test_names_are_models_own() -> None:
    with pytest.raises(ConfigError, match="two models have the name 'a': give one another"):
        specs("a=x/y", "b,a=x/z")
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        specs("nowhere.toml")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("5m", 300), ("1h30m", 5400), ("90", 90), ("0", 0), ("-1", float("inf")), ("250ms", 0.25)],
)
def test_durations(text: str, seconds: float) -> None:
    assert RouterOptions(keep_alive=text).keep_alive_seconds == seconds


@settings(max_examples=30)
@given(st.text(max_size=8))
def test_a_duration_is_read_or_refused(text: str) -> None:
    with contextlib.suppress(ConfigError):
        assert RouterOptions(keep_alive=text).keep_alive_seconds >= 0
