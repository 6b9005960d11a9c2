"""Outputs of a given form: `python examples/structured.py [MODEL]`. Needs the extra `structured`.

Tokens that would leave the form are never drawn, so the text can be parsed: the shipped model,
which knows nothing but its glossary, writes nonsense in the right form.
"""

import json
import sys

from nanovllm import LLM, SamplingParams, StructuredOutputsParams, demo_model

BOOK = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "maxLength": 30},
        "year": {"type": "integer", "minimum": 1450, "maximum": 2030},
        "kind": {"enum": ["novel", "poems", "textbook"]},
    },
    "required": ["title", "year", "kind"],
    "additionalProperties": False,
}
FORMS = {
    "a JSON schema": StructuredOutputsParams(json=BOOK, disable_any_whitespace=True),
    "a regular expression": StructuredOutputsParams(regex=r"\d{4}-\d{2}-\d{2}"),
    "one of a few strings": StructuredOutputsParams(choice=["positive", "negative"]),
    "a grammar": StructuredOutputsParams(grammar='start: "yes" | "no" | "no, " /[a-z]{3,9}/'),
}


def main() -> None:
    llm = LLM(sys.argv[1] if len(sys.argv) > 1 else demo_model.MODEL)
    messages = [{"role": "user", "content": "Describe a book."}]
    for name, form in FORMS.items():
        params = SamplingParams(temperature=0.8, seed=1, max_tokens=100, structured_outputs=form)
        (output,) = llm.chat(messages, params, use_tqdm=False)
        print(f"{name}: {output.text}")
        if form.json is not None:
            print(f"  parsed: {json.loads(output.text)}")
    llm.shutdown()


if __name__ == "__main__":
    main()
