"""The same text in fewer steps: `python examples/speculation.py [MODEL]`.

Here the tokens that followed the same words earlier are proposed, and the model verifies several in
one step. A proposal stands only if it is what the model draws itself, so the text cannot change, at
any temperature. It pays where a text repeats what is in the prompt. A smaller model or an EAGLE-3
head can propose instead: docs/speculation.md.
"""

import sys
import time

from nanovllm import LLM, SamplingParams, demo_model

TEXT = (
    "A language model makes one token at a time. Each new token neeeds the keys and values of all "
    "tokens before it. Computing many requests together costs litle more than computing one."
)
QUESTION = f"Copy the following text and correct the spelling mistakes.\n\n{TEXT}"


def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else demo_model.default_model()
    messages = [{"role": "user", "content": QUESTION}]
    params = SamplingParams(temperature=0, max_tokens=60)
    texts = set()
    for way in (None, {"method": "ngram", "num_speculative_tokens": 4}):
        llm = LLM(model, speculative_config=way, enable_prefix_caching=False)
        llm.chat(messages, params, use_tqdm=False)  # the engine learns what a step costs
        start = time.perf_counter()
        (output,) = llm.chat(messages, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        num_tokens = len(output.token_ids)
        num_steps = num_tokens - output.metrics.drafts.num_accepted_tokens
        print(f"{way}: {num_tokens} tokens in {num_steps} steps, {seconds:.2f} s")
        texts.add(output.text)
        llm.shutdown()
    print(f"{len(texts)} text: {texts.pop()}")


if __name__ == "__main__":
    main()
