"""What a server says of its arithmetic."""

from openai import OpenAI


def test_the_model_and_the_fingerprint_say_what_is_guaranteed(client: OpenAI) -> None:
    (model,) = client.models.list().data
    arithmetic = model.model_dump()["arithmetic"]
    assert arithmetic["dtype"] == arithmetic["weights"] == arithmetic["kv_cache"]
    assert arithmetic["num_ranks"] == 1
    answer = client.completions.create(model=model.id, prompt="A cache", max_tokens=1)
    is_said = "-invariant-" in (answer.system_fingerprint or "")
    assert is_said == arithmetic["batch_invariant"]
    assert arithmetic["kernels"].startswith("C, ") or not is_said
