"""A client of `nanovllm serve` by OpenAI's library: `python examples/server_client.py [URL]`.

Start the server first, in another terminal: `nanovllm serve` and, here, `pip install openai`.
"""

import sys

from openai import OpenAI


def main() -> None:
    url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    model = client.models.list().data[0].id
    print(f"model: {model}")

    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "What is paged attention?"}],
        temperature=0,
        max_tokens=100,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        if chunk.choices:
            print(chunk.choices[0].delta.content or "", end="", flush=True)
        if chunk.usage:
            print(f"\n{chunk.usage.completion_tokens} tokens")

    # Fields that OpenAI's API lacks go into extra_body.
    completion = client.completions.create(
        model=model, prompt="A KV cache is", max_tokens=20, extra_body={"top_k": 5, "min_p": 0.1}
    )
    print(completion.choices[0].text)


if __name__ == "__main__":
    main()
