"""The host's share of a step is measured with graphs in place of the model."""

from benchmarks import host


def test_a_step_is_a_graph_that_does_nothing(monkeypatch):
    replays = []
    monkeypatch.setattr(host._Graph, "replay", lambda graph: replays.append(graph))
    engine = host.make_engine(3, 8)
    try:
        assert host.step_seconds(engine, 3, 8) > 0
        generated = {metric.name: metric for metric in engine.get_metrics()}
    finally:
        engine.shutdown()
    assert len(replays) == 7, "the first of 8 tokens comes from the step with the prompts"
    assert generated["vllm:generation_tokens"].value == 3 * 8
