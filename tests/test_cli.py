"""The command line: its output, its errors and exit statuses, and a flag for each field."""

import dataclasses
import io
import json
import os
import subprocess
import sys
import types
import typing
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from nanovllm import LLM, SamplingParams, cli, demo_model
from nanovllm.config import Config
from tests.glossary import ANSWERS, ENTRIES, QUESTIONS
from tests.helpers import environment

# Eager: capturing graphs would write a progress bar.
FAST = ["--num-kvcache-blocks", "64", "--max-model-len", "512", "--enforce-eager"]

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run the command line with `stdin`; return its status, standard output and standard error."""

    def run(*argv: str, stdin: str = "") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        status = cli.main(argv)
        return status, *capsys.readouterr()

    return run


def generate(run: Run, *arguments: str, stdin: str = "") -> str:
    status, out, err = run("generate", *FAST, demo_model.MODEL, *arguments, stdin=stdin)
    assert (status, err) == (0, "")
    return out


def test_generate_answers_one_prompt(run: Run) -> None:
    assert generate(run, QUESTIONS[0]) == f" {ANSWERS[0]}\n"


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


def test_generate_answers_many_prompts(run: Run) -> None:
    lines = generate(run, *QUESTIONS[:5]).splitlines()
    assert lines == [f" {answer}" for answer in ANSWERS[:5]]


def test_generate_takes_flags_anywhere(run: Run) -> None:
    """Flags may stand before the model, after it, between the prompts, and after them."""
    stop = ["--stop", "glossary of"]
    kept = [f" {ANSWERS[0].partition(stop[1])[0]}", *(f" {answer}" for answer in ANSWERS[1:3])]
    for place in range(5):
        words = [demo_model.MODEL, *QUESTIONS[:3]]
        words[place:place] = stop
        status, out, err = run("generate", *FAST, *words)
        assert (status, err) == (0, "")
        assert out.splitlines() == kept


def test_generate_reads_lines(run: Run) -> None:
    stdin = f"{QUESTIONS[0]}\n\n  \n{QUESTIONS[1]}\n{QUESTIONS[2]}"
    lines = generate(run, stdin=stdin).splitlines()
    assert lines == [f" {answer}" for answer in ANSWERS[:3]]
    assert generate(run, stdin="") == ""


def test_generate_renders_prompts_as_chats(run: Run) -> None:
    assert generate(run, "--chat", QUESTIONS[3]) == f"{ANSWERS[3]}\n"
    assert generate(run, "--chat", *QUESTIONS[:3]).splitlines() == ANSWERS[:3]


def test_generate_writes_json(run: Run) -> None:
    lines = generate(run, "--json", "--logprobs", "1", *QUESTIONS[:2]).splitlines()
    for line, (question, answer) in zip(lines, ENTRIES, strict=False):
        assert (line.isascii()) == (answer.isascii())
        record = json.loads(line)
        assert record["prompt"] == question
        assert record["text"] == f" {answer}"
        assert record["index"] == 0
        assert record["finish_reason"] == "stop"
        assert record["stop_reason"] is None
        assert len(record["logprobs"]) == len(record["token_ids"])
        assert record["logprobs"][0][str(record["token_ids"][0])]["rank"] == 1
    assert len(lines) == 2


def test_generate_json_names_the_prompt_of_a_chat(run: Run) -> None:
    (line,) = generate(run, "--json", "--chat", QUESTIONS[4]).splitlines()
    record = json.loads(line)
    assert (record["prompt"], record["text"]) == (QUESTIONS[4], ANSWERS[4])


def test_generate_writes_several_continuations(run: Run) -> None:
    options = ["--n", "2", "--temperature", "3", "--seed", "4", "--max-tokens", "30"]
    records = [
        json.loads(line) for line in generate(run, "--json", QUESTIONS[7], *options).splitlines()
    ]
    assert [record["index"] for record in records] == [0, 1]
    lines = generate(run, QUESTIONS[7], *options).splitlines()
    assert lines == [record["text"] for record in records]
    assert lines[0] != lines[1]


def test_generate_stops_at_stop_strings(run: Run) -> None:
    answer = f" {ANSWERS[0]}"
    for flags, end in (
        (["--stop", "tiny"], answer.index("tiny")),
        (["--stop", "never there", "--stop", "👋 I"], answer.index("👋")),
        (["--stop", "tiny", "--include-stop-str-in-output"], answer.index("tiny") + 4),
        (["--stop", "tiny", "--no-include-stop-str-in-output"], answer.index("tiny")),
    ):
        assert generate(run, QUESTIONS[0], *flags) == answer[:end] + "\n"


def test_generate_uses_the_checkpoints_parameters_and_512_tokens(run: Run) -> None:
    """The demo model's generation_config.json is greedy and sets no length: the default is 512."""
    first = generate(run, QUESTIONS[0], "--ignore-eos", "--json", "--max-model-len", "1024")
    assert len(json.loads(first)["token_ids"]) == 512
    assert json.loads(first)["text"].startswith(f" {ANSWERS[0]}")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--temperature", "-1"], "temperature must be a finite number >= 0, got -1.0"),
        (["--max-tokens", "0"], "max_tokens must be an integer >= 1, got 0"),
        (["--top-p", "2"], "top_p must be from 0 to 1, got 2.0"),
        (["--stop", ""], "stop must not hold an empty string"),
        (["--stop-token-ids", "5"], "stop_token_ids must be a list of token ids, got 5"),
        (["--stop-token-ids", "[5000]"], "stop_token_ids holds token 5000"),
        (["--max-num-seqs", "0"], "max_num_seqs must be an integer >= 1, got 0"),
        (["--dtype", "int3"], "dtype must be one of"),
        (["--max-model-len", "2"], "the prompt has"),
        (["--num-kvcache-blocks", "1"], "1 blocks"),
    ],
)
def test_bad_value_is_one_line_and_status_2(run: Run, arguments: list[str], message: str) -> None:
    status, out, err = run("generate", demo_model.MODEL, QUESTIONS[0], *FAST, *arguments)
    assert (status, out) == (2, "")
    assert err.startswith("nanovllm: ")
    assert message in err
    assert err.count("\n") == 1


def test_missing_model_is_one_line_and_status_2(run: Run) -> None:
    status, out, err = run("generate", "/no/such/model", "Hi")
    assert (status, out) == (2, "")
    assert err == "nanovllm: model directory '/no/such/model' does not exist\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "required: COMMAND"),
        (["serve"], "invalid choice: 'serve'"),
        (["generate"], "required: model"),
        (["generate", "m", "p", "--temprature", "1"], "unrecognized arguments: --temprature"),
        (["generate", "m", "--temprature", "1", "p"], "unrecognized arguments: --temprature"),
        (["generate", "m", "p", "--temperature", "hot"], "invalid float value: 'hot'"),
        (["generate", "m", "p", "--max-tokens", "1.5"], "invalid int value: '1.5'"),
        (["generate", "m", "p", "--logit-bias", "{"], "argument --logit-bias"),
        (["generate", "m", "p", "--system", "x"], "unrecognized arguments: --system"),
        (["chat", "m", "--json"], "unrecognized arguments: --json"),
        (["chat", "m", "--chat-template-kwargs", "{"], "argument --chat-template-kwargs"),
        (["chat", "m", "--chat-template-kwargs", "[1]"], "argument --chat-template-kwargs"),
        (["chat", "m", "Hi"], "unrecognized arguments: Hi"),
    ],
)
def test_bad_arguments_are_refused_by_argparse(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert message in shown.err


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_help_names_every_flag(capsys: pytest.CaptureFixture[str], command: str) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main([command, "--help"])
    assert caught.value.code == 0
    shown = capsys.readouterr().out
    for field in dataclasses.fields(Config) + dataclasses.fields(SamplingParams):
        assert field.name == "model" or f"--{field.name.replace('_', '-')}" in shown


class Recorder:
    """Stands for an LLM and records the options and parameters it is given."""

    made: typing.ClassVar[list[dict[str, Any]]] = []
    asked: typing.ClassVar[list[SamplingParams]] = []

    def __init__(self, **options: Any) -> None:
        self.made.append(options)
        self.engine = types.SimpleNamespace(generation_config={})

    def get_default_sampling_params(self) -> SamplingParams:
        return SamplingParams(temperature=0.25, max_tokens=77)

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


def example_of(hint: Any) -> tuple[str, Any]:
    """Return an argument for a field of this type, and the value it stands for."""
    if isinstance(hint, types.UnionType):
        (hint,) = (arg for arg in typing.get_args(hint) if arg is not type(None))
    return {
        int: ("3", 3),
        float: ("0.5", 0.5),
        str: ("some text", "some text"),
        tuple[str, ...]: ("some text", ("some text",)),
        tuple[int, ...]: ("[3, 4]", (3, 4)),
        tuple[tuple[int, float], ...]: ('{"3": 0.5}', ((3, 0.5),)),
    }[hint]


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (owner, field.name)
        for owner in (Config, SamplingParams)
        for field in dataclasses.fields(owner)
        if field.name != "model"
    ],
)
def test_every_field_has_a_flag(run: Run, recorder: Any, owner: type[Any], name: str) -> None:
    hint = typing.get_type_hints(owner)[name]
    flag = "--" + name.replace("_", "-")
    if hint is bool:
        cases = [([flag], True), (["--no-" + flag.removeprefix("--")], False)]
    else:
        argument, value = example_of(hint)
        cases = [([flag, argument], value)]
    for arguments, value in cases:
        assert run("generate", "some model", "Hi", *arguments)[0] == 0
        options, params = recorder.made.pop(), recorder.asked.pop()
        if owner is SamplingParams:
            assert getattr(params, name) == value
            untouched = dataclasses.replace(params, **{name: getattr(SamplingParams(), name)})
        else:
            assert options.pop(name) == value
            untouched = dataclasses.replace(params, seed=None)
        expected = {"temperature": 0.25, "max_tokens": 512}
        expected.pop(name, None)
        assert untouched == SamplingParams(**expected)
        options.pop("seed", None)
        assert options == {"model": "some model"}


def test_seed_sets_the_engines_and_the_requests(run: Run, recorder: Any) -> None:
    assert run("generate", "some model", "Hi", "--seed", "5")[0] == 0
    assert recorder.made == [{"model": "some model", "seed": 5}]
    assert recorder.asked[0].seed == 5


def test_new_field_gets_a_flag(run: Run, recorder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclasses.dataclass(frozen=True)
    class NewConfig(Config):
        num_spoons: int = 1
        polished: bool = False

    @dataclasses.dataclass(frozen=True)
    class NewParams(SamplingParams):
        sweetness: float | None = None

    monkeypatch.setattr(cli, "Config", NewConfig)
    monkeypatch.setattr(cli, "SamplingParams", NewParams)
    flags = ["--num-spoons", "7", "--polished", "--sweetness", "0.5"]
    assert run("generate", "some model", "Hi", *flags)[0] == 0
    assert recorder.made == [{"model": "some model", "num_spoons": 7, "polished": True}]
    assert recorder.asked[0].sweetness == 0.5


@pytest.fixture
def rendered(monkeypatch: pytest.MonkeyPatch) -> list[list[Any]]:
    """The conversations rendered during the test, in order."""
    found: list[list[Any]] = []
    render = LLM.render

    def noted(self: LLM, messages: Any, **options: Any) -> list[int]:
        found.append(list(messages))
        return render(self, messages, **options)

    monkeypatch.setattr(LLM, "render", noted)
    return found


def chat(run: Run, *arguments: str, lines: list[str]) -> tuple[list[str], str]:
    status, out, err = run("chat", *arguments, *FAST, stdin="".join(f"{li}\n" for li in lines))
    assert status == 0
    return out.splitlines(), err


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


def test_chat_takes_the_glossary_by_default(run: Run) -> None:
    assert chat(run, lines=[QUESTIONS[2]]) == ([ANSWERS[2]], "")


def test_chat_commands_reset_and_exit(run: Run, rendered: list[Any]) -> None:
    lines = [QUESTIONS[0], "/reset", QUESTIONS[1], " /exit ", QUESTIONS[2]]
    assert chat(run, lines=lines) == (ANSWERS[:2], "")
    assert rendered == [turn(0)[:1], turn(1)[:1]]
    assert chat(run, lines=[]) == ([], "")
    assert chat(run, lines=["/exit"]) == ([], "")


def test_chat_system_message_outlives_a_reset(run: Run, rendered: list[Any]) -> None:
    lines = [QUESTIONS[0], "/reset", QUESTIONS[1]]
    assert chat(run, "--system", "Be brief.", lines=lines) == (ANSWERS[:2], "")
    system = {"role": "system", "content": "Be brief."}
    assert rendered == [[system, *turn(0)[:1]], [system, *turn(1)[:1]]]


def test_chat_passes_options_to_the_template(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = []
    stream = LLM.stream

    def noted(self: LLM, prompt: Any, params: SamplingParams) -> Iterator[Any]:
        tokenizer = self.get_tokenizer()
        assert tokenizer is not None
        prompts.append(tokenizer.decode(prompt))
        return stream(self, prompt, params)

    monkeypatch.setattr(LLM, "stream", noted)
    options = ["--chat-template-kwargs", '{"enable_thinking": false}']
    assert chat(run, *options, lines=[QUESTIONS[0]]) == (ANSWERS[:1], "")
    assert prompts[0].endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")


def test_chat_continues_after_a_prompt_that_is_too_long(run: Run, rendered: list[Any]) -> None:
    lines = [QUESTIONS[0], "very " * 600 + "long", QUESTIONS[1]]
    answers, err = chat(run, lines=lines)
    assert answers == ANSWERS[:2]
    assert "max_model_len 512" in err
    assert "/reset" in err
    assert rendered[-1] == [*turn(0), *turn(1)[:1]]


def test_chat_refuses_several_continuations(run: Run) -> None:
    status, out, err = run("chat", *FAST, "--n", "2", stdin="Hi\n")
    assert (status, out) == (2, "")
    assert "n must be 1, got 2" in err


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
    def interrupted(prompt: str) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr("builtins.input", interrupted)
    assert run("chat", *FAST) == (130, "", "")


def test_chat_at_a_terminal_explains_itself(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stdin", Terminal(f"{QUESTIONS[0]}\n/exit\n"))
    assert cli.main(["chat", *FAST]) == 0
    assert capsys.readouterr().out == f"{cli.HELP}\n> {ANSWERS[0]}\n> "


def test_closed_output_pipe_ends_without_a_traceback() -> None:
    """Symptom: `nanovllm generate ... | head` ends with a traceback."""
    command = [sys.executable, "-m", "nanovllm.cli", "generate", demo_model.MODEL, *FAST]
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb") as out:
        done = subprocess.run(
            [*command, *QUESTIONS[:2]],
            stdout=out,
            stderr=subprocess.PIPE,
            env=environment(),
            timeout=60,
        )
    assert done.returncode == 141
    assert b"Traceback" not in done.stderr


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_binary_standard_input_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    lines = io.TextIOWrapper(io.BytesIO(b"a\xff\n"), encoding="utf-8")
    monkeypatch.setattr(sys, "stdin", lines)
    assert cli.main([command, demo_model.MODEL, *FAST]) == 2
    assert "standard input is not utf-8 text" in capsys.readouterr().err


def test_command_runs_as_a_process() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "nanovllm.cli", "generate", demo_model.MODEL, "--chat", *FAST],
        input="\n".join(QUESTIONS[:2]),
        capture_output=True,
        text=True,
        env=environment(PYTHONIOENCODING="utf-8"),
        timeout=60,
    )
    assert done.returncode == 0
    assert "Traceback" not in done.stderr
    assert done.stdout.splitlines() == ANSWERS[:2]
