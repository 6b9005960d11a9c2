"""A chat in the terminal, token by token: `python examples/chat.py [MODEL]`.

The conversation grows; the prefix cache keeps what the model has read, so each turn computes only
what is new. An empty line ends it.
"""

import sys

from nanovllm import LLM, SamplingParams, demo_model


def main() -> None:
    llm = LLM(sys.argv[1] if len(sys.argv) > 1 else demo_model.MODEL)
    params = SamplingParams(temperature=0.7, top_p=0.9, max_tokens=200)
    messages: list[dict[str, str]] = []
    while question := input("> ").strip():
        messages.append({"role": "user", "content": question})
        prompt = llm.render(messages, add_generation_prompt=True)
        answer = ""
        for delta in llm.stream(prompt, params):
            print(delta.text, end="", flush=True)
            answer += delta.text
        print()
        messages.append({"role": "assistant", "content": answer})
    llm.shutdown()


if __name__ == "__main__":
    main()
