"""The command line: its output, its errors and exit statuses, and a flag for each field."""

import dataclasses
import errno
import io
import json
import os
import re
import shlex
import subprocess
import sys
import types
import typing
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import nanovllm.__main__
from nanovllm import SamplingParams, StructuredOutputsParams, demo_model
from nanovllm.apps.cli import main as cli
from nanovllm.apps.cli.arguments import EXAMPLES
from nanovllm.engine.input_processor import InputProcessor
from nanovllm.engine.prompt import Prompt
from nanovllm.errors import InvalidRequestError
from nanovllm.llm import LLM
from nanovllm.options.config import Config
from nanovllm.options.flags import RECOMMENDED, fields_of, given_fields, in_flags
from nanovllm.options.sampling_params import default_sampling_params
from nanovllm.outputs import CompletionOutput, RequestMetrics, RequestOutput
from nanovllm.utils import terminal
from tests.glossary import ANSWER_TO, ANSWERS, ENTRIES, QUESTION, QUESTIONS
from tests.helpers import environment

# Eager: capturing graphs would write a progress bar.
UNNAMED = "nanovllm: no MODEL is named, so the glossary model that ships with nanovllm answers\n"
FAST = ["--num-kvcache-blocks", "64", "--max-model-len", "512", "--enforce-eager"]

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def engines() -> Iterator[dict[str, LLM]]:
    made: dict[str, LLM] = {}
    yield made
    for llm in made.values():
        llm.shutdown()


@pytest.fixture(autouse=True)
def shared_engines(engines: dict[str, LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands with the same options have one engine."""

    def shared(**options: Any) -> LLM:
        key = repr(sorted(options.items()))
        if key not in engines:
            engines[key] = LLM(**options)
        return engines[key]

    monkeypatch.setattr("nanovllm.llm.LLM", shared)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run the command line with `stdin`; return its status, standard output and standard error."""

    def run(*argv: str, stdin: str = "") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        monkeypatch.setattr(demo_model, "smollm2", lambda: None)
        status = cli.main(argv)
        return status, *capsys.readouterr()

    return run


def generate(run: Run, *arguments: str, stdin: str = "") -> str:
    status, out, err = run("generate", *FAST, demo_model.MODEL, *arguments, stdin=stdin)
    assert (status, err) == (0, "")
    return out


def test_generate_writes_one_prompt_as_it_comes(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed = []
    flush = io.TextIOBase.flush

    class Screen(io.StringIO):
        def flush(self) -> None:
            flushed.append(self.getvalue())
            flush(self)

    monkeypatch.setattr(sys, "stdout", Screen())
    generate(run, QUESTIONS[1])
    whole = f" {ANSWERS[1]}\n"
    assert len(set(flushed)) > 10
    assert all(whole.startswith(shown) for shown in flushed)


def test_generate_takes_flags_anywhere(run: Run) -> None:
    """Flags may stand before the model, after it, between the prompts, and after them."""
    stop = ["--stop", "glossary of"]
    kept = [f" {ANSWERS[0].partition(stop[1])[0]}", *(f" {answer}" for answer in ANSWERS[1:3])]
    for place in (0, 2, 4):
        words = [demo_model.MODEL, *QUESTIONS[:3]]
        words[place:place] = stop
        status, out, err = run("generate", *FAST, *words)
        assert (status, err) == (0, "")
        assert out.splitlines() == kept


def test_generate_reads_lines(run: Run) -> None:
    stdin = f"{QUESTIONS[0]}\n\n  \n{QUESTIONS[1]}\n{QUESTIONS[2]}"
    assert generate(run, stdin=stdin).splitlines() == [f" {answer}" for answer in ANSWERS[:3]]
    assert generate(run, "--chat", stdin=stdin).splitlines() == ANSWERS[:3]


def test_generate_writes_json(run: Run) -> None:
    lines = generate(run, "--json", "--chat", "--logprobs", "1", *QUESTIONS[:2]).splitlines()
    for line, (question, answer) in zip(lines, ENTRIES, strict=False):
        assert (line.isascii()) == (answer.isascii())
        record = json.loads(line)
        assert (record["prompt"], record["text"]) == (question, answer)
        assert record["index"] == 0
        assert record["finish_reason"] == "stop"
        assert record["stop_reason"] is None
        assert len(record["logprobs"]) == len(record["token_ids"])
        assert record["logprobs"][0][str(record["token_ids"][0])]["rank"] == 1
    assert len(lines) == 2


def test_generate_writes_several_continuations(run: Run) -> None:
    options = ["--n", "2", "--temperature", "3", "--seed", "4", "--max-tokens", "30"]
    records = [
        json.loads(line) for line in generate(run, "--json", QUESTIONS[7], *options).splitlines()
    ]
    assert [record["index"] for record in records] == [0, 1]
    texts = [record["text"] for record in records]
    assert generate(run, QUESTIONS[7], *options) == "".join(f"{text}\n" for text in texts)
    assert texts[0] != texts[1]


def test_generate_stops_at_stop_strings(run: Run) -> None:
    answer = f" {ANSWERS[0]}"
    for flags, end in (
        (["--stop", "never there", "--stop", "👋 I"], answer.index("👋")),
        (["--stop", "tiny", "--include-stop-str-in-output"], answer.index("tiny") + 4),
    ):
        assert generate(run, QUESTIONS[0], *flags) == answer[:end] + "\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--stop-token-ids", "[5000]"], "--stop-token-ids holds token 5000"),
        (["--max-model-len", "2"], "prompt is too long"),
        (["--num-kvcache-blocks", "1"], "1 blocks"),
    ],
)
def test_what_the_model_refuses_is_one_line(run: Run, arguments: list[str], message: str) -> None:
    status, out, err = run("generate", demo_model.MODEL, QUESTIONS[0], *FAST, *arguments)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("nanovllm: ")
    assert message in err


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "COMMAND is missing: generate, chat, run, serve, explain, batch, models"),
        ("genrate Hi", "no command 'nanovllm genrate'; did you mean 'generate'? (see nano"),
        (
            "complete" * 50,
            "; known: batch, chat, explain, generate, lab, learn, models",
        ),
        ("generate --prefix-caching m p", "did you mean '--enable-prefix-caching'?"),
        ("generate --max-token 9", "no flag --max-token; did you mean '--max-tokens'?"),
        ("generate m --temprature=1 p", "did you mean '--temperature'?"),
        ("generate m p --xyzzy", "there is no flag --xyzzy (see nanovllm generate"),
        ("generate m p --temperature hot", "must be a number, got 'hot'"),
        ("generate m p --max-tokens 1.5", "must be an integer, got '1.5'"),
        (f"generate m p --max-tokens {'9' * 5000}", "--max-tokens: must be an integer"),
        ("generate m p --logit-bias {", "--logit-bias: not JSON: Expecting property"),
        ("generate m p --logit-bias {}]", "Extra data at character 3 of '{}]'"),
        (f"generate m p --logit-bias {'[' * 100_000}", "--logit-bias: not JSON"),
        ("generate m p --speculative-config 5", "--speculative-config must be a dict"),
        ('chat m --speculative-config {"method":"ngrm"}', "did you mean 'ngram'?"),
        ("generate m p --system x", "there is no flag --system"),
        ("generate m p --stop", "argument --stop: expected one argument"),
        ("generate m p --stop=", "--stop must not hold an empty string"),
        ("generate m p --dtype int3", "--dtype must be one of"),
        ("chat m --json", "there is no flag --json"),
        ("chat m --chat-template-kwargs [1]", "--chat-template-kwargs: not a JSON obj"),
        ("serve --max-body-bytes 4g", "--max-body-bytes: must be a number of bytes, or"),
        ("generate m p --kv-cache-memory-bytes many", "as in 512MiB or 4GiB; got 'many'"),
        (f"generate m p --kv-cache-memory-bytes {'9' * 5000}", "must be a number of bytes"),
        ("generate m p --kv-cache-memory-bytes 0GiB", "--kv-cache-memory-bytes must be"),
        ("chat m Hi", "chat takes a MODEL, and run a question, too, got 'Hi'"),
        ("ps", "there is no command 'nanovllm ps': a server's models are at /v1/models"),
        ("run-batch -i x", "there is no command 'nanovllm run-batch': use batch"),
        (
            "generate no/model Hi --temperature -1",
            "--temperature must be a finite number >= 0",
        ),
        ("generate no/model Hi --min-tokens 9 --max-tokens 5", "--min-tokens"),
        ("generate no/model Hi a\udcff", "prompt 1 is not UTF-8 text: it has byte 0xff"),
        ("chat no-model --n 2", "--n must be 1, got 2"),
        ("chat no-model --system \udc80", "the system message is not UTF-8 text"),
    ],
    ids=lambda text: text[:40].encode(errors="replace").decode(),
)
def test_bad_usage_is_one_line_and_status_2(
    run: Run, recorder: Any, line: str, message: str
) -> None:
    """The line names what is wrong, and does not repeat a long value. No model is loaded."""
    status, out, err = run(*line.split())
    assert (status, out, err.count("\n"), recorder.made) == (2, "", 1, [])
    assert err.startswith("nanovllm: ")
    assert message in err
    assert len(err) < 250


@pytest.mark.parametrize(("arguments", "stdin"), [([QUESTION], ""), ([], QUESTION)])
def test_generate_without_model_takes_the_default(
    run: Run, arguments: list[str], stdin: str
) -> None:
    done = run("generate", *FAST, *arguments, stdin=stdin)
    assert done == (0, f" {ANSWER_TO[QUESTION]}\n", UNNAMED)


@pytest.mark.parametrize(
    ("arguments", "name"),
    [(["no/model"], "no/model"), (["-"], "the glossary model that"), ([], "the glossary model")],
)
def test_no_prompt_is_an_error_before_the_model(
    run: Run, recorder: Any, arguments: list[str], name: str
) -> None:
    status, out, err = run("generate", *arguments, stdin="\n  \n")
    assert (status, out, recorder.made) == (2, "", [])
    assert err.startswith(f"nanovllm: there is no prompt for {name}")
    assert "give one, as in nanovllm generate '" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "num_prompts"),
    [
        (["Hi"], 1),
        (["and/or so"], 1),
        (["x" * 5000], 1),
        (["./here", "Hi"], 1),
        (["Qwen/Qwen3-0.6B", "Hi"], 1),
        (["missing.gguf", "Hi"], 1),
        (["a model", "Hi"], 1),
        (["/no/where", "Hi", "there"], 2),
    ],
)
def test_a_model_is_a_path_or_has_a_slash(
    run: Run,
    recorder: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    words: list[str],
    num_prompts: int,
) -> None:
    """All other first words of `generate` are prompts."""
    (tmp_path / "here").mkdir()
    (tmp_path / "a model").mkdir()
    monkeypatch.chdir(tmp_path)
    given: list[list[str]] = []
    monkeypatch.setattr(cli, "_prompts", lambda args: given.append(args.prompt) or args.prompt)
    assert run("generate", *words)[0] == 0
    model = words[0] if len(words) > num_prompts else demo_model.MODEL
    assert ([made["model"] for made in recorder.made], given) == ([model], [words[-num_prompts:]])


def test_min_tokens_may_exceed_the_default_length(run: Run, recorder: Any) -> None:
    """Only the loaded checkpoint knows how many tokens it recommends."""
    status, _, err = run("generate", "some/model", "Hi", "--min-tokens", "600")
    assert (status, len(recorder.made)) == (2, 1)
    assert "--min-tokens must be an integer from 0 to 512" in err


def test_generate_says_at_a_terminal_what_it_does(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It loads a model, which takes seconds, and it does not answer a chat model's prompt."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    hint = "nanovllm: continuing the text as it is; with --chat the model answers it\n"
    for flags, hints in (([], 1), (["--chat"], 0)):
        status, out, err = run("generate", *FAST, *flags, QUESTION)
        assert (status, out.strip()) == (0, ANSWER_TO[QUESTION])
        assert err.startswith(UNNAMED)
        assert err.count(hint) == hints


def test_words_with_a_dash_are_prompts(run: Run, recorder: Any, monkeypatch: Any) -> None:
    """Before and after a flag, as long as they do not look like a flag."""
    given: list[list[str]] = []
    monkeypatch.setattr(cli, "_prompts", lambda args: given.append(args.prompt) or args.prompt)
    for words, prompts in (
        (["a/model", "- milk", "--n", "1", "- eggs", "-5"], ["- milk", "- eggs", "-5"]),
        (["a/model", "--n", "1", "-"], ["-"]),
        (["a/model", "Hi", "--n", "1", "--", "--n", "-x"], ["Hi", "--n", "-x"]),
        (["--n", "1", "--", "--n is"], ["--n is"]),
    ):
        status, _, err = run("generate", *words)
        assert (status, err) == (0, "" if words[0] == "a/model" else UNNAMED)
        assert given.pop() == prompts


def test_version(run: Run) -> None:
    assert run("--version") == (0, f"nanovllm {nanovllm.__version__}\n", "")


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_help_explains_every_flag(run: Run, command: str) -> None:
    status, out, err = run(command, "--help-all")
    assert (status, err) == (0, "")
    shown = "".join(out.split())  # argparse breaks lines, also at hyphens
    for owner in (Config, SamplingParams):
        for name in fields_of(owner):
            assert name == "model" or f"--{name.replace('_', '-')}" in shown
    for text in (
        "Randomness of the sampling: the logits are divided by it.",
        "Maximum number of tokens to generate. (default: the checkpoint's, or else 512)",
        "and bounds the KV pool alone. (default: 0.9)",
        "(default: the checkpoint's, or else "
        + ("0.8)" if command == "chat" else "1.0; 0.8 with --chat)"),
        "--enforce-eager, --no-enforce-eager",
    ):
        assert "".join(text.split()) in shown


@pytest.mark.parametrize(
    ("command", "flag"),
    [("generate", "--top-p"), ("chat", "--url"), ("run", "--system"), ("serve", "--api-key"),
     ("explain", "--html"), ("batch", "--workers"), ("prove", "--full"), ("lab check", "--fair")],
)  # fmt: skip
def test_help_is_short(run: Run, monkeypatch: pytest.MonkeyPatch, command: str, flag: str) -> None:
    """Symptom: 278 lines, in which nobody finds --temperature."""
    monkeypatch.setenv("COLUMNS", "80")
    status, out, err = run(*command.split(), "--help")
    assert (status, err) == (0, "")
    assert out.count("\n") < 60
    assert f"  {flag}" in out
    assert "--kvcache-block-size" not in out
    assert "--help-all" in out
    everything = run(*command.split(), "--help-all")[1]
    assert "--kvcache-block-size" in everything
    assert len(everything) > 3 * len(out)
    if command in EXAMPLES:
        first, second = out.partition("examples:\n")[2].splitlines()
        for line in (first, second):
            cli._parse(shlex.split(line)[1:])


@pytest.mark.parametrize("command", [["generate"], ["chat"], ["serve"], ["explain"]])
def test_help_speaks_no_python(run: Run, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    """Each flag has a help whose defaults and names are words of the command line."""
    monkeypatch.setenv("COLUMNS", "1000")
    status, out, _ = run(*command, "--help-all")
    flags = re.split(r"\n  (?=-)", out)[2:]
    assert status == 0
    assert len(flags) > 20
    for flag in flags:
        assert not re.search(r"\bNone\b|\bTrue\b|\bFalse\b|default: [('\"]", flag), flag
        names = re.findall(r"(?<![\w/\"])[a-z]+(?:_[a-z]+)+(?![\w.'])", flag)
        spoken = {"num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min"}
        spoken.add("raw_logprobs")
        assert set(names) <= spoken, flag
        is_named = "--help" in flag or "--chat" in flag or "--json" in flag or "--url" in flag
        assert "(default: " in flag or is_named, flag


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("512MiB", 2**29),
        ("1.5GiB", 3 * 2**29),
        ("4G", 2**32),
        ("4GB", 4 * 10**9),
        ("2kB", 2000),
        ("7B", 7),
    ],
)
def test_a_size_may_have_a_unit(text: str, size: int) -> None:
    args = cli._parse(["generate", "--kv-cache-memory-bytes", text, "Hi"])
    assert given_fields(Config, args)["kv_cache_memory_bytes"] == size
    args = cli._parse(["generate", "--kv-offload-gib", text, "Hi"])
    gib = float(text) if text.isdigit() else size / 2**30
    assert given_fields(Config, args)["kv_offload_gib"] == gib


@pytest.mark.parametrize(
    ("text", "spelled"),
    [
        ("device 'cuda': no GPU; use device=\"cpu\"", "--device 'cuda': no GPU; use --device cpu"),
        ("for greedy use temperature=0", "for greedy use --temperature 0"),
        ("needs detokenize=True; use stop_token_ids", "needs --detokenize; use --stop-token-ids"),
        ("with native_kernels=False (why)", "with --no-native-kernels (why)"),
        ("n must be 1", "--n must be 1"),
        ("max_model_len 4 leaves", "--max-model-len 4 leaves"),
        ("model directory '/seed' has no dtype", "model directory '/seed' has no dtype"),
        (
            "/a/max_model_len/x or generation_config.json",
            "/a/max_model_len/x or generation_config.json",
        ),
        ("prompt 'max_tokens isn\\'t top_k' is", "prompt 'max_tokens isn\\'t top_k' is"),
        ("the model's top_k, the user's", "the model's --top-k, the user's"),
        (
            "prompt_lookup_max and hf_overrides={'a': 1}",
            "prompt_lookup_max and --hf-overrides={'a': 1}",
        ),
        ("argument --max-tokens: must be", "argument --max-tokens: must be"),
    ],
)
def test_errors_name_flags(text: str, spelled: str) -> None:
    """The library's errors name fields and Python's values."""
    assert in_flags(text, cli._parse(["generate", "Hi"]).parser) == spelled


def test_a_server_has_its_own_default_of_max_logprobs() -> None:
    """A flag wins over it."""
    found = [
        given_fields(Config, cli._parse([*words, "m"])).get("max_logprobs")
        for words in (["serve"], ["serve", "--max-logprobs", "7"], ["chat"])
    ]
    assert found == [20, 7, None]


def test_help_tells_what_a_checkpoint_may_recommend() -> None:
    """`RECOMMENDED` names the fields that `default_sampling_params` sets."""
    config = dict.fromkeys(("temperature", "top_p", "min_p", "repetition_penalty"), 0.5)
    config |= {"top_k": 5, "max_new_tokens": 7}
    params = default_sampling_params(config)
    changed = {
        field.name
        for field in dataclasses.fields(SamplingParams)
        if getattr(params, field.name) != field.default
    }
    assert changed == set(RECOMMENDED)


class Recorder:
    """Stands for an LLM and records the options and parameters it is given."""

    made: typing.ClassVar[list[dict[str, Any]]] = []
    asked: typing.ClassVar[list[SamplingParams]] = []

    def __init__(self, **options: Any) -> None:
        self.made.append(options)
        processor = types.SimpleNamespace(tokenizer=None)
        self.engine = types.SimpleNamespace(generation_config={}, input_processor=processor)

    def get_default_sampling_params(self) -> SamplingParams:
        return cli.SamplingParams(temperature=0.25, max_tokens=77)

    def stream(self, prompt: str, params: SamplingParams) -> Iterator[Any]:
        self.asked.append(params)
        return iter(())

    def generate(self, prompts: list[str], params: SamplingParams, use_tqdm: bool) -> list[Any]:
        self.asked.append(params)
        return [types.SimpleNamespace(outputs=[]) for _ in prompts]


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> type[Recorder]:
    monkeypatch.setattr("nanovllm.llm.LLM", Recorder)
    monkeypatch.setattr(Recorder, "made", [])
    monkeypatch.setattr(Recorder, "asked", [])
    return Recorder


FLAG_VALUES: dict[Any, tuple[str, Any]] = {
    int: ("3", 3),
    float: ("0.5", 0.5),
    str: ("some text", "some text"),
    Sequence[str]: ("some text", ["some text"]),
    Sequence[int]: ("[3, 4]", [3, 4]),
}
"""By type of a field: a flag's argument, and the value that it stands for; else it is JSON."""


@pytest.mark.parametrize("owner", [Config, SamplingParams])
def test_every_field_has_a_flag(owner: type[Any]) -> None:
    words: list[str] = []
    expected: dict[str, Any] = {}
    switches = [name for name, field in fields_of(owner).items() if field.kind is bool]
    for name, field in fields_of(owner).items():
        if name not in ("model", *switches):
            argument, value = FLAG_VALUES.get(field.kind, ('{"a": [3]}', {"a": [3]}))
            words += [f"--{name.replace('_', '-')}", argument]
            expected[name] = value
    for prefix, is_on in (("--", True), ("--no-", False)):
        flags = [prefix + name.replace("_", "-") for name in switches]
        args = cli._parse(["generate", "some/model", "Hi", *words, *flags])
        given = {**given_fields(owner, args), "model": None}
        assert given == {**expected, **dict.fromkeys(switches, is_on), "model": None}


def test_flags_reach_the_engine_and_the_request(run: Run, recorder: Any) -> None:
    """A seed is for both. What no flag sets is as the checkpoint recommends."""
    flags = ["--seed", "5", "--top-k", "7", "--structured-outputs", '{"regex": "a+"}']
    assert run("generate", "some/model", "Hi", *flags, "--max-num-seqs", "3")[0] == 0
    assert recorder.made == [{"model": "some/model", "seed": 5, "max_num_seqs": 3}]
    form = StructuredOutputsParams(regex="a+")
    expected = SamplingParams(0.25, 512, seed=5, top_k=7, structured_outputs=form)
    assert recorder.asked == [expected]


def test_new_field_gets_a_flag(run: Run, recorder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclasses.dataclass(frozen=True)
    class NewConfig(Config):
        num_spoons: int = 1
        """How many spoons there are; 50% are clean."""
        polished: bool = False
        hook: Callable[..., int] | None = None

    @dataclasses.dataclass(frozen=True)
    class NewParams(SamplingParams):
        sweetness: float | None = None

    for module in ("nanovllm.apps.cli.main", "nanovllm.options.flags"):
        monkeypatch.setattr(f"{module}.Config", NewConfig)
        monkeypatch.setattr(f"{module}.SamplingParams", NewParams)
    shown = " ".join(run("chat", "--help-all")[1].split())
    assert "--num-spoons INT How many spoons there are; 50% are clean. (default: 1)" in shown
    assert "--hook" not in shown, "a command line cannot hold a function"
    flags = ["--num-spoons", "7", "--polished", "--sweetness", "0.5"]
    assert run("generate", "some/model", "Hi", *flags)[0] == 0
    assert recorder.made == [{"model": "some/model", "num_spoons": 7, "polished": True}]
    assert recorder.asked[0].sweetness == 0.5


@pytest.fixture
def rendered(monkeypatch: pytest.MonkeyPatch) -> list[list[Any]]:
    """The conversations rendered during the test, in order."""
    found: list[list[Any]] = []
    render = InputProcessor.render

    def noted(self: InputProcessor, messages: Any, options: Any) -> Prompt:
        found.append(list(messages))
        return render(self, messages, options)

    monkeypatch.setattr(InputProcessor, "render", noted)
    return found


def chat(run: Run, *arguments: str, lines: list[str]) -> tuple[list[str], str]:
    status, out, err = run("chat", *arguments, *FAST, stdin="".join(f"{li}\n" for li in lines))
    assert status == 0
    return out.splitlines(), err.removeprefix(UNNAMED)


def turn(index: int) -> list[dict[str, str]]:
    return [
        {"role": "user", "content": QUESTIONS[index]},
        {"role": "assistant", "content": ANSWERS[index]},
    ]


def test_chat_keeps_the_conversation(run: Run, rendered: list[Any]) -> None:
    lines = [QUESTIONS[0], "", f"  {QUESTIONS[5]} ", QUESTIONS[9]]
    assert chat(run, demo_model.MODEL, lines=lines) == ([ANSWERS[i] for i in (0, 5, 9)], "")
    assert rendered == [
        turn(0)[:1],
        [*turn(0), *turn(5)[:1]],
        [*turn(0), *turn(5), *turn(9)[:1]],
    ]


def test_run_answers_one_question(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "is_interactive", lambda: True)
    flags = [*FAST, "--temperature", "0"]
    for words in ([demo_model.MODEL, QUESTIONS[0]], [demo_model.MODEL, *QUESTIONS[0].split()]):
        status, out, _ = run("run", *words, *flags, stdin="not read")
        assert (status, out) == (0, f"{ANSWERS[0]}\n")
    status, _, err = run("run", demo_model.MODEL, "x " * 999, *flags)
    assert status == 2
    assert "tokens" in err
    status, _, err = run("run", "/no/such", QUESTIONS[0])
    assert status == 2
    assert "model directory '/no/such' does not exist" in err


def test_chat_commands_reset_and_exit(run: Run, rendered: list[Any]) -> None:
    """The system message outlives a reset."""
    lines = [QUESTIONS[0], "/reset", QUESTIONS[1], " /exit ", QUESTIONS[2]]
    assert chat(run, "--system", "Be brief.", lines=lines) == (ANSWERS[:2], "")
    system = {"role": "system", "content": "Be brief."}
    assert rendered == [[system, *turn(0)[:1]], [system, *turn(1)[:1]]]
    assert chat(run, lines=[]) == ([], "")
    assert chat(run, "--max-tokens", "1", lines=["/etc/hosts is a file"])[1] == ""
    assert rendered[-1][-1]["content"] == "/etc/hosts is a file"


def test_chat_passes_options_to_the_template(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = []
    stream = LLM.stream

    def noted(self: LLM, prompt: Any, params: SamplingParams) -> Iterator[Any]:
        prompts.append(prompt.text)
        return stream(self, prompt, params)

    monkeypatch.setattr(LLM, "stream", noted)
    options = ["--chat-template-kwargs", '{"enable_thinking": false}']
    assert chat(run, *options, lines=[QUESTIONS[0]]) == (ANSWERS[:1], "")
    assert prompts[0].endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")


def test_chat_continues_after_a_prompt_that_is_too_long(run: Run, rendered: list[Any]) -> None:
    lines = [QUESTIONS[0], "very " * 600 + "long", QUESTIONS[1]]
    answers, err = chat(run, lines=lines)
    assert answers == ANSWERS[:2]
    assert "--max-model-len 512 allows" in err
    assert "/reset" in err
    assert rendered[-1] == [*turn(0), *turn(1)[:1]]


def test_chat_continues_after_an_interrupted_answer(
    run: Run, rendered: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interrupted question and its partial answer are dropped from the conversation."""
    stream = LLM.stream
    engines = []

    def interrupted_once(self: LLM, prompt: Any, params: SamplingParams) -> Iterator[Any]:
        pieces = stream(self, prompt, params)
        engines.append(self.engine)
        if len(engines) > 1:
            assert self.engine.scheduler.num_unfinished == 1, "the first one is still running"
            yield from pieces
            return
        for _ in range(3):
            yield next(pieces)
        raise KeyboardInterrupt

    monkeypatch.setattr(LLM, "stream", interrupted_once)
    shown, err = chat(run, lines=QUESTIONS[:2])
    assert err == ""
    assert ANSWERS[0].startswith(shown[0])
    assert 0 < len(shown[0]) < len(ANSWERS[0])
    assert shown[1:] == [ANSWERS[1]]
    assert rendered == [turn(0)[:1], turn(1)[:1]]
    assert engines[0].is_finished()


def test_interrupt_between_answers_ends_the_chat(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted(io.StringIO):
        def readline(self, size: int | None = -1, /) -> str:
            raise KeyboardInterrupt

    monkeypatch.setattr(io, "StringIO", Interrupted)
    assert run("chat", *FAST) == (130, "", UNNAMED)


def test_interrupt_while_loading_is_one_line(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(**options: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("nanovllm.llm.LLM", interrupted)
    line = "nanovllm: interrupted while loading the model\n"
    assert run("generate", "some/model", "Hi") == (130, "", line)


def test_interrupted_stream_ends_with_a_newline(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = LLM.stream

    def interrupted(self: LLM, prompt: Any, params: SamplingParams) -> Iterator[Any]:
        yield next(stream(self, prompt, params))
        raise KeyboardInterrupt

    monkeypatch.setattr(LLM, "stream", interrupted)
    status, out, err = run("generate", demo_model.MODEL, QUESTIONS[0], *FAST)
    assert (status, err) == (130, "")
    assert out.endswith("\n")


def test_chat_commands(run: Run, rendered: list[Any], tmp_path: Path) -> None:
    saved = tmp_path / "chat.json"
    lines = [
        "/help",
        "/system Be brief.",
        QUESTIONS[0],
        f"/save {saved}",
        f"/save {saved}",
        "/save",
        f"/save {tmp_path}/no/where",
        "/rest",
        "/reset now",
        "/" + "x" * 1000,
        "/system",
        "/reset",
        QUESTIONS[1],
    ]
    shown, err = chat(run, lines=lines)
    assert shown[-2:] == ANSWERS[:2]
    assert [line.split()[0] for line in shown[:-2]] == [
        *("/help", "/system", "/image", "/regen", "/save", "/reset", "/clear", "/exit"),
        *('"""', "Ctrl-C"),
    ]
    system = {"role": "system", "content": "Be brief."}
    assert json.loads(saved.read_text(encoding="utf-8")) == [system, *turn(0)]
    assert rendered == [[system, *turn(0)[:1]], turn(1)[:1]]
    messages = err.splitlines()
    for message, expected in zip(
        messages,
        (
            "exists already; give another name",
            "/save needs the name of a file",
            "cannot write",
            "there is no command /rest; did you mean '/reset'?",
            "/reset takes no argument, got 'now'",
            "there is no command /xxx",
        ),
        strict=True,
    ):
        assert expected in message
        assert len(message) < 300


def test_chat_answers_again(run: Run, rendered: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The old answer is not in the prompt of the new one, and stays if that fails."""
    stream = LLM.stream

    def third_fails(self: LLM, prompt: Any, params: SamplingParams) -> Iterator[Any]:
        if len(rendered) == 3:
            raise InvalidRequestError("no")
        return stream(self, prompt, params)

    monkeypatch.setattr(LLM, "stream", third_fails)
    lines = ["/regen", QUESTIONS[0], "/regen", "/regen", "/regen now", "/set top_p 1", QUESTIONS[1]]
    shown, err = chat(run, lines=lines)
    assert shown == [ANSWERS[0], ANSWERS[0], ANSWERS[1]]
    assert rendered == [turn(0)[:1]] * 3 + [[*turn(0), *turn(1)[:1]]]
    for line, message in zip(
        err.splitlines(),
        (
            "there is no message yet to answer again",
            "no (/reset starts a new conversation)",
            "/regen takes no argument, got 'now'",
            "there is no command /set: flags at the start set parameters, such as --temperature",
        ),
        strict=True,
    ):
        assert message in line


def test_answer_that_ends_with_an_error_is_not_kept(
    run: Run, rendered: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model whose logits are not numbers ends the request with the finish reason "error"."""
    broken = CompletionOutput(0, "Half", [5], "error", "the logits are NaN")
    times = RequestMetrics(0.0, 0.0, 0.0, 0.0)
    output = RequestOutput(0, None, [1], [broken], True, 0, times)
    monkeypatch.setattr(LLM, "stream", lambda *_: iter([output]))
    monkeypatch.setattr(LLM, "generate", lambda *_, **__: [output, output])
    shown, err = chat(run, lines=QUESTIONS[:2])
    assert shown == ["Half", "Half"]
    assert err.count("the answer ended with an error: the logits are NaN") == 2
    assert rendered == [turn(0)[:1], turn(1)[:1]]
    for prompts in (QUESTIONS[:1], QUESTIONS[:2]):
        status, out, err = run("generate", demo_model.MODEL, *prompts, *FAST)
        assert (status, out) == (2, "Half\n" * len(prompts))
        assert "ended with an error" in err


def test_output_for_a_terminal_holds_no_control_characters(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model's text cannot move the cursor or set the window's title."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    terminal.write("a\x1b]0;title\x07\tb\r\x9b1A\n")
    assert capsys.readouterr().out == "a\\x1b]0;title\\x07\tb\\x0d\\x9b1A\n"


class Full(io.StringIO):
    """A stream of a full disk."""

    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize(
    ("name", "stream", "status", "err"),
    [
        ("stdout", Full(), 1, "nanovllm: cannot write the output: No space left on device\n"),
        ("stdout", None, 1, "nanovllm: standard output is closed\n"),
        ("stderr", Full(), 0, ""),
        ("stderr", None, 0, ""),
        ("stdin", None, 0, ""),
    ],
)
def test_unusable_stream_is_one_line_at_most(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    stream: Any,
    status: int,
    err: str,
) -> None:
    monkeypatch.setattr(sys, name, stream)
    assert cli.main(["generate", demo_model.MODEL, QUESTIONS[0], *FAST]) == status
    shown = capsys.readouterr()
    assert shown.err == err
    assert shown.out == ("" if status else f" {ANSWERS[0]}\n")


@pytest.mark.parametrize("command", [["generate", "a/model"], ["chat"]])
def test_closed_input_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    assert cli.main(command) == 2
    assert "standard input is closed" in capsys.readouterr().err


def test_process_with_unusable_streams_ends_in_one_line() -> None:
    """Python itself writes a traceback if it cannot flush a stream when it ends."""
    program = f"{shlex.quote(sys.executable)} -m nanovllm"
    for command, status, err in (
        ("--help >/dev/full", 1, "nanovllm: cannot write the output: No space left on device\n"),
        ("--oops 2>/dev/full", 2, ""),
        ("chat <&-", 2, "nanovllm: standard input is closed, so there is nothing to answer\n"),
    ):
        done = subprocess.run(
            ["sh", "-c", f"{program} {command}"],
            stderr=subprocess.PIPE,
            env=environment(),
            text=True,
            timeout=60,
        )
        assert (done.returncode, done.stderr) == (status, err)


def test_output_without_unicode_is_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    """PYTHONIOENCODING=ascii: text is still readable, JSON is still exact."""
    for flags in ([], ["--json"]):
        raw = io.BytesIO()
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
        assert cli.main(["generate", demo_model.MODEL, QUESTIONS[0], *FAST, *flags]) == 0
        out = raw.getvalue().decode("ascii")
        text = json.loads(out)["text"] if flags else out.removesuffix("\n")
        assert text == f" {ANSWERS[0]}".replace("👋", "👋" if flags else "\\U0001f44b")


def test_closed_output_pipe_ends_without_a_traceback() -> None:
    """Symptom: `nanovllm generate ... | head` ends with a traceback."""
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb") as out:
        done = subprocess.run(
            [sys.executable, "-m", "nanovllm.apps.cli.main", "learn"],
            stdout=out,
            stderr=subprocess.PIPE,
            env=environment(),
            timeout=60,
        )
    assert done.returncode == 141
    assert b"Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("command", "encoding", "handler"),
    [
        ("generate", "utf-8", "strict"),
        ("generate", "utf-8", "surrogateescape"),
        ("chat", "ascii", "strict"),
    ],
)
def test_binary_standard_input_is_refused(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    command: str,
    encoding: str,
    handler: str,
) -> None:
    """Python reads such bytes as lone surrogates under LC_ALL=C."""
    lines = io.TextIOWrapper(io.BytesIO(b"a\xff\n"), encoding=encoding, errors=handler)
    monkeypatch.setattr(sys, "stdin", lines)
    assert cli.main([command, demo_model.MODEL, *FAST]) == 2
    message = f"nanovllm: standard input is not {encoding.upper()} text: it has byte 0xff\n"
    assert capsys.readouterr() == ("", message)


def test_text_is_utf8_in_an_ascii_locale() -> None:
    """Python reads each byte above 127 as a lone surrogate there."""
    assert terminal.check_text("a prompt", "caf\udcc3\udca9") == "café"
    with pytest.raises(InvalidRequestError, match="a prompt is no Unicode text"):
        terminal.check_text("a prompt", "\ud800")


def test_interrupt_while_it_is_imported_is_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted:
        def find_spec(self, name: str, *_: Any) -> None:
            if name == "nanovllm.apps.cli.main":
                raise KeyboardInterrupt

    monkeypatch.setattr(sys, "meta_path", [Interrupted(), *sys.meta_path])
    monkeypatch.delitem(sys.modules, "nanovllm.apps.cli.main")
    assert nanovllm.__main__.main() == 130
