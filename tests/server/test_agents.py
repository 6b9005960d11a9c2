"""Agents' requests in the public formats of Codex and Claude Code, replayed turn by turn."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from nanovllm import AsyncLLM, demo_model
from nanovllm.apps.server.responses_route import custom_arguments, custom_input
from tests.server.conftest import Running, running

AGENTS = Path(__file__).parent / "agents"


class Agent(NamedTuple):
    """How an agent talks: its route, where its conversation is, and the tokens it counts."""

    name: str
    path: str
    conversation: str
    limit: str


CODEX = Agent("codex", "/v1/responses", "input", "max_output_tokens")
CLAUDE = Agent("claude_code", "/v1/messages?beta=true", "messages", "max_tokens")


@pytest.fixture(scope="module")
def server(front: str) -> Iterator[Running]:
    """A server with room for the tools of an agent."""
    llm = AsyncLLM(demo_model.MODEL, max_model_len=4096, num_kvcache_blocks=256)
    with running(llm) as found:
        yield found
    llm.shutdown()


def recorded(agent: Agent) -> tuple[dict[str, Any], list[Any]]:
    found = json.loads((AGENTS / f"{agent.name}.json").read_text("utf-8"))
    return found["request"] | {agent.limit: 4}, found["turns"]


def events_of(server: Running, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    reply = server.send(path, body)
    assert reply.status == 200, reply.body
    return [json.loads(line[6:]) for line in reply.body.splitlines() if line.startswith("data: ")]


def prompt_and_computed(events: list[dict[str, Any]]) -> tuple[int, int]:
    """Return how many tokens the prompt has, and how many of them were not cached."""
    for event in events:
        if event["type"] in ("response.completed", "response.incomplete"):
            usage = event["response"]["usage"]
            given = usage["input_tokens"]
            return given, given - usage["input_tokens_details"]["cached_tokens"]
        if event["type"] == "message_start":
            usage = event["message"]["usage"]
            computed = usage["input_tokens"]
            return computed + usage["cache_read_input_tokens"], computed
    raise AssertionError(events)


@pytest.mark.parametrize("agent", [CODEX, CLAUDE], ids=lambda agent: agent.name)
def test_a_turn_computes_only_what_is_new(server: Running, agent: Agent) -> None:
    """Five turns; Claude Code's first line is another one in each."""
    body, turns = recorded(agent)
    before = 0
    for number, added in enumerate(([], *turns)):
        body[agent.conversation] += added
        if agent is CLAUDE:
            line = body["system"][0]
            body["tools"].reverse()  # which are in the prompt by their names
            line["text"] = f"{line['text'].partition('cch=')[0]}cch={number * 7919:05x};"
        num_prompt, computed = prompt_and_computed(events_of(server, agent.path, body))
        assert num_prompt > before
        if number:
            block_size = server.state.llm.engine.worker_info.block_size
            assert computed <= num_prompt - before + block_size
        before = num_prompt
    assert before > 300


def test_codex_gets_calls_of_its_own_kinds(server: Running) -> None:
    """A grammar makes the model call each tool: the shipped one was not trained to."""
    body, _ = recorded(CODEX)
    calls = [
        ("exec_command", '{"cmd": "ls"}'),
        ("apply_patch", '{"input": "*** Begin Patch\\n+\\"é\\"\\n"}'),
        ("mcp__docs__read_page", '{"name": "style"}'),
    ]
    text = "\n".join(
        f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
        for name, arguments in calls
    )
    body |= {"max_output_tokens": 300, "structured_outputs": {"choice": [text]}}
    events = events_of(server, CODEX.path, body)
    done = [e["item"] for e in events if e["type"] == "response.output_item.done"]
    assert done == events[-1]["response"]["output"]
    command, patch, page = done
    assert (command["type"], command["name"]) == ("function_call", "exec_command")
    assert "namespace" not in command
    assert (page["name"], page["namespace"]) == ("read_page", "mcp__docs")
    assert patch["type"] == "custom_tool_call"
    assert patch["input"] == '*** Begin Patch\n+"é"\n'
    inputs = [e for e in events if e["type"].startswith("response.custom_tool_call_input")]
    assert [e.get("delta", e.get("input")) for e in inputs] == [patch["input"]] * 2
    # What it sends next has the calls as they came, and is the same to the model.
    del body["structured_outputs"]
    outputs: list[Any] = [
        {"type": call["type"] + "_output", "call_id": call["call_id"], "output": "ok"}
        for call in done
    ]
    body["input"] += [*done, *outputs]
    num_prompt, computed = prompt_and_computed(events_of(server, CODEX.path, body))
    assert computed < num_prompt / 2


def test_reasoning_comes_back_encoded(server: Running) -> None:
    """Clients that keep `encrypted_content` in place of the text lose nothing."""
    grammar = 'start: <think> "\\nThe user asks.\\n" </think> "\\n\\nLet me look."'
    body: dict[str, Any] = {"input": "Hi", "include": ["reasoning.encrypted_content"]}
    reply = server.send(CODEX.path, {**body, "structured_outputs": {"grammar": grammar}})
    reasoning, _ = reply.body["output"]
    sizes = []
    for change in ({}, {"content": None}, {"content": None, "encrypted_content": "other"}):
        given = [{"role": "user", "content": "Hi"}, {**reasoning, **change}]
        reply = server.send(CODEX.path, {"input": given, "max_output_tokens": 1})
        sizes.append(reply.body["usage"]["input_tokens"])
    assert sizes[0] == sizes[1] > sizes[2]
    for broken in ("nanovllm:%", "nanovllm:/w=="):
        given = [{"role": "user", "content": "Hi"}, {**reasoning, "content": None}]
        given[1]["encrypted_content"] = broken
        reply = server.send(CODEX.path, {"input": given, "max_output_tokens": 1})
        assert reply.body["usage"]["input_tokens"] == sizes[2]


FUNCTION = {"type": "function", "name": "a__b"}
CUSTOM = {"type": "custom", "name": "b"}
NAMESPACE = {"type": "namespace", "name": "a"}


@pytest.mark.parametrize(
    ("tools", "param", "message"),
    [
        ([{"type": "web_search"}], "tools[0].type", 'in Codex set web_search = "disabled"'),
        ([FUNCTION, {**NAMESPACE, "tools": [CUSTOM]}], "tools", "two tools are called 'a__b'"),
        ([{**NAMESPACE, "tools": [{"type": "mcp"}]}], "tools[0].tools[0].type", "'mcp' is not"),
        (
            [{**CUSTOM, "format": {"type": "grammar"}}],
            *("tools[0].format.definition", "syntax and definition"),
        ),
        ([{"name": "a"}], "tools[0].type", "the tool None is not"),
        ([{**NAMESPACE, "tools": [CUSTOM] * 99}] * 11, "tools", "at most 1024 tools"),
    ],
)
def test_tools_that_codex_may_not_send(
    server: Running, tools: list[Any], param: str, message: str
) -> None:
    reply = server.send(CODEX.path, {"input": "Hi", "tools": tools})
    assert (reply.status, reply.error["param"]) == (400, param)
    assert message in reply.error["message"]


def test_the_input_of_a_custom_tool_comes_back_and_other_arguments_whole() -> None:
    for text in ("", "a", '{"input": 5}', '*** "é"\n\\ \u2028', '["'):
        assert custom_input(custom_arguments(text)) == text
        assert custom_input(text) == text
        assert custom_input(json.dumps({"other": text})) == json.dumps({"other": text})


def test_a_custom_tool_that_must_be_called(server: Running) -> None:
    form = {"type": "grammar", "syntax": "regex", "definition": "[ab]{3}"}
    tool: dict[str, Any] = {"type": "custom", "name": "f", "format": form}
    body = {"input": "Hi", "tools": [tool], "tool_choice": {"type": "custom", "name": "f"}}
    (call,) = server.send(CODEX.path, body).body["output"]
    assert call["type"] == "custom_tool_call"
    assert set(call["input"]) <= set("ab")
    assert len(call["input"]) == 3
    form["syntax"] = "lark"
    reply = server.send(CODEX.path, body)
    assert (reply.status, reply.error["param"]) == (400, "tool_choice")
    assert "Lark grammar" in reply.error["message"]
