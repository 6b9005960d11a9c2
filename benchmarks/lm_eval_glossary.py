"""Write a task for lm-eval from the shipped model's glossary: which answer belongs to a question?

The task checks that a server returns log-probabilities of prompts in the way that evaluation
harnesses need. Prints the command that runs it against a server.
"""

import argparse
import json
import random
from pathlib import Path

from nanovllm import demo_model

TASK = """task: glossary
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: label
metric_list:
  - metric: acc
"""


def documents(count: int) -> list[dict[str, object]]:
    """Return questions with four answers each, of which one is right."""
    entries, rng = list(demo_model.entries()), random.Random(0)
    found: list[dict[str, object]] = []
    for question, answer in rng.sample(entries, min(count, len(entries))):
        others = [other for _, other in entries if other != answer]
        choices = [answer, *rng.sample(others, 3)]
        rng.shuffle(choices)
        found.append({"question": question, "choices": choices, "label": choices.index(answer)})
    return found


def main() -> None:
    """Write glossary.yaml and glossary.jsonl."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.lm_eval_glossary", description=__doc__
    )
    parser.add_argument("directory", type=Path)
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", default="demo", help="the name that the server has for it")
    args = parser.parse_args()
    args.directory.mkdir(parents=True, exist_ok=True)
    data = (args.directory / "glossary.jsonl").absolute()
    data.write_text("".join(json.dumps(document) + "\n" for document in documents(args.count)))
    (args.directory / "glossary.yaml").write_text(TASK.format(data=data))
    options = f"model={args.model},base_url={args.url}/v1/completions,tokenizer={demo_model.MODEL}"
    print(
        f"lm_eval --model local-completions --tasks glossary --include_path {args.directory} "
        f"--model_args {options},num_concurrent=4,tokenized_requests=True"
    )


if __name__ == "__main__":
    main()
