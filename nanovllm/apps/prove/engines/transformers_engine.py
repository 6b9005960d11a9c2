"""Computes greedy requests with transformers' generate, padded on the left; see __init__.py."""

import json
import os
import sys
from collections.abc import Sequence as Seq
from typing import Any


def main() -> None:
    """Run the job on standard input."""
    job = json.load(sys.stdin)
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever the engine prints goes to standard error
    import torch
    import transformers

    name = f"transformers {transformers.__version__}, torch {torch.__version__}"
    out.write(json.dumps({"engine": name}) + "\n")
    torch.set_num_threads(job["options"].get("num_threads", torch.get_num_threads()))
    model = transformers.AutoModelForCausalLM.from_pretrained(job["model"], dtype="auto").eval()
    more = job["options"].get("generate", {})
    for name, calls in job["ways"]:
        answers: list[Any] = []
        for call in calls:
            requests = [job["requests"][index] for index in call]
            answers += zip(call, _generate(model, requests, more), strict=True)
        out.write(json.dumps({"way": name, "answers": answers}) + "\n")


def _generate(model: Any, requests: Seq[Any], more: dict[str, Any]) -> list[Any]:
    import torch

    width = max(len(prompt) for prompt, _ in requests)
    longest = max(params["max_tokens"] for _, params in requests)
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt, _ in requests])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt, _ in requests])
    done = model.generate(
        ids,
        attention_mask=mask,
        do_sample=False,
        max_new_tokens=longest,
        min_new_tokens=longest,
        eos_token_id=None,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
        **more,
    )
    found = []
    for row, (_, params) in enumerate(requests):
        tokens = done.sequences[row, width : width + params["max_tokens"]].tolist()
        at_tokens = []
        for logits, token in zip(done.logits, tokens, strict=False):
            at_tokens.append([[token, float(logits[row].double().log_softmax(-1)[token])]])
        found.append([tokens, at_tokens, []])
    return found


if __name__ == "__main__":
    main()
