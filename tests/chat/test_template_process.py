"""A chat template cannot take more than its share: every way to loop or grow ends in an error."""

import gc
import json
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from nanovllm.chat.template_process import TemplateError, TemplateProcess

LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


def grow(start: str, step: str, name: str = "ns") -> str:
    """Return a template that replaces {name}.x, which begins as `start`, by `step` 99 times."""
    loop = "{% for i in range(99) %}{% set " + name + ".x = " + step + " %}{% endfor %}"
    return "{% set " + name + " = namespace(x=" + start + ") %}" + loop


NEST = grow("[1]", "[ns.x, ns.x]")  # a list whose text would have 2**99 digits
OTHER_NEST = grow("[1]", "[other.x, other.x]", "other")


@pytest.fixture(scope="module")
def process() -> Iterator[TemplateProcess]:
    made = TemplateProcess()
    yield made
    made.shutdown()


def pid_of(process: TemplateProcess) -> int:
    assert process._process._process is not None
    return process._process._process.pid


@pytest.mark.parametrize(
    ("template", "limit"),
    [
        (NEST + OTHER_NEST + "{{ ns.x == other.x }}", "1 s of processor time"),
        ("{{ 'a' * 10**10 }}", "256 MiB"),
        ("{{ '{:9999999999}'.format(1) }}", "256 MiB"),
        (grow("'a'", "ns.x ~ ns.x"), "256 MiB"),
        ("{% for a in range(99999) %}" + "a" * 1000 + "{% endfor %}", "16777216 characters"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "calls itself without end"),
        ("{{ " + "(" * 10**5 + " }}", "nested too deeply"),
        ("{% for %}", "Expected an expression"),
        ("{{ raise_exception('a' * 10**6) }}", "^a{300}$"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{% include '/etc/passwd' %}", "no loader"),
    ],
    ids=lambda text: text[:50],
)
def test_template_that_fails_is_an_error(
    process: TemplateProcess, template: str, limit: str
) -> None:
    with pytest.raises(TemplateError, match=limit):
        process.render(template, {})
    assert process.render("{{ x }}", {"x": "as before"}) == "as before"


def test_same_process_renders_one_template_after_another(process: TemplateProcess) -> None:
    process.render("a", {})
    before = pid_of(process)
    with pytest.raises(TemplateError):
        process.render("{{ raise_exception('no') }}", {})
    texts = [process.render("{{ x }}", {"x": x}) for x in ("", "a\nb", "é日\u2028\U0010ffff\ud800")]
    assert texts == ["", "a\nb", "é日\u2028\U0010ffff\ud800"]
    assert pid_of(process) == before


def test_process_that_died_is_started_again(process: TemplateProcess) -> None:
    process.render("a", {})
    os.kill(pid_of(process), signal.SIGKILL)
    running = process._process._process
    assert running is not None
    running.wait()
    assert process.render("b", {}) == "b"


def test_process_that_dies_while_rendering_is_an_error(process: TemplateProcess) -> None:
    process.render("a", {})
    killer = threading.Timer(0.1, os.kill, (pid_of(process), signal.SIGKILL))
    killer.start()
    with pytest.raises(TemplateError, match="its process ended with status -9"):
        process.render(LOOP, {})
    killer.join()
    assert process.render("b", {}) == "b"


def test_interrupt_does_not_shift_the_replies(
    process: TemplateProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Symptom: after Ctrl-C while rendering, a conversation gets the text of the one before."""
    process.render("a", {})

    class Interrupted:
        def __init__(self, pipe: Any) -> None:
            self.pipe = pipe

        def read(self, size: int) -> bytes:
            raise KeyboardInterrupt

        def __getattr__(self, name: str) -> Any:
            return getattr(self.pipe, name)

    running = process._process._process
    assert running is not None
    monkeypatch.setattr(running, "stdout", Interrupted(running.stdout))
    with pytest.raises(KeyboardInterrupt):
        process.render("first", {})
    assert process.render("second", {}) == "second"


def test_threads_get_their_own_texts(process: TemplateProcess) -> None:
    found: dict[int, list[str]] = {}

    def work(index: int) -> None:
        found[index] = [process.render("{{ x }}", {"x": [index, turn]}) for turn in range(20)]

    threads = [threading.Thread(target=work, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {i: [f"[{i}, {turn}]" for turn in range(20)] for i in range(8)}


def test_forked_process_gets_an_error() -> None:
    """Two processes on one pair of pipes would read each other's texts, or wait for ever."""
    process = TemplateProcess()
    process.render("a", {})
    child = os.fork()
    if not child:
        signal.alarm(20)  # ends a child that waits
        try:
            process.render("a", {})
        except TemplateError as error:
            process.shutdown()
            del process
            gc.collect()
            os._exit(7 if "forked" in str(error) else 1)
        os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 7
    before = pid_of(process)
    assert process.render("b", {}) == "b"
    assert pid_of(process) == before
    process.shutdown()


def test_process_ends_with_its_owner() -> None:
    process = TemplateProcess()
    process.render("a", {})
    pid = pid_of(process)
    del process
    gc.collect()
    assert not psutil.pid_exists(pid)


def test_no_process_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/no/such/python")
    with pytest.raises(TemplateError, match="cannot start a process"):
        TemplateProcess().render("a", {})


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ m.role }}: {{ m['content'] | trim }}\n{% endfor %}",
        "{{- bos_token }}{% if tools %}{{ tools | tojson }}{% endif %}{{ messages|length }}",
        "{{ tools | tojson(indent=4) }}{{ messages[0] | tojson }}{{ messages | list }}",
        "{% generation %}  {{ messages[0].content }}\n  {% set x = 1 %}{% endgeneration %}{{ x }}",
        "{% for m in messages %}{% if loop.last %}{% break %}{% endif %}{{ m.role }}{% endfor %}",
        "  {% if add_generation_prompt is defined %}\n  yes\n  {% endif %}\n{{ documents }}",
        "{{ strftime_now('%Y') }}{{ messages[::-1] | map(attribute='role') | join(',') }}",
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}"
        "{{ ns.n }}{{ messages[-1].content.split('o') }}{{ messages[0] is mapping }}{{ none }}",
    ],
)
def test_text_is_that_of_transformers(process: TemplateProcess, template: str) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    messages = [{"role": "user", "content": " Hello! é"}, {"role": "assistant", "content": "Hi.\n"}]
    tools = [{"type": "function", "function": {"name": "f<>&'", "n": 1.5, "x": [True, None]}}]
    variables: dict[str, Any] = {"tools": tools, "documents": None, "add_generation_prompt": True}
    (expected,), _ = render_jinja_template(
        conversations=[messages], chat_template=template, bos_token="<s>", **variables
    )
    variables |= {"messages": messages, "bos_token": "<s>"}
    assert process.render(template, json.loads(json.dumps(variables))) == expected
