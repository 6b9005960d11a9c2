"""Random JSON schemas, and whether a model's outputs for them are valid."""

import json
import random
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import ValidationError

from nanovllm import LLM, SamplingParams


def random_schema(rng: random.Random, depth: int = 3) -> dict[str, Any]:
    """Return a JSON schema whose values are bounded: an output is finished after some 300 tokens.

    Args:
        depth: how many levels of objects and arrays there may be.
    """
    if depth and (depth == 3 or rng.random() < 0.5):
        return rng.choice([_object, _object, _array, _any_of])(rng, depth - 1)
    return rng.choice([_string, _number, _choice, _plain])(rng)


def _plain(rng: random.Random) -> dict[str, Any]:
    return {"type": rng.choice(["boolean", "null"])}


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(["name", "a b", "größe", "$x", "kind", 'quo"te', "items", "n1"], 4)
    properties = {name: random_schema(rng, depth) for name in names[: rng.randint(1, 4)]}
    required = [name for name in properties if rng.random() < 0.7]
    found = {"type": "object", "properties": properties, "required": required}
    return {**found, "additionalProperties": False}


def _array(rng: random.Random, depth: int) -> dict[str, Any]:
    least = rng.randint(0, 2)
    items = random_schema(rng, depth)
    return {"type": "array", "items": items, "minItems": least, "maxItems": least + 1}


def _any_of(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [random_schema(rng, depth) for _ in range(rng.randint(1, 3))]}


def _string(rng: random.Random) -> dict[str, Any]:
    least = rng.randint(0, 4)
    return rng.choice(
        [
            {"type": "string", "minLength": least, "maxLength": least + rng.randint(0, 9)},
            {
                "type": "string",
                "pattern": rng.choice(["^[a-c]{2,5}$", "^x+y?z$|^$", r"^\d{4}-\d\d$"]),
            },
            {"type": "string", "format": rng.choice(["date", "ipv4", "uuid"])},
        ]
    )


def _number(rng: random.Random) -> dict[str, Any]:
    low = rng.randint(-300, 300)
    high = low + rng.randint(8, 2000)
    return rng.choice(
        [
            {"type": "integer", "minimum": low, "maximum": high},
            {"type": "integer", "exclusiveMinimum": low, "maximum": high, "multipleOf": 4},
            {"type": "number", "minimum": low, "exclusiveMaximum": high},
        ]
    )


def _choice(rng: random.Random) -> dict[str, Any]:
    values = ["red", "rot", "", 'a "b"', 17, -2, 0.5, True, None, {"a": [1]}, "é"]
    if rng.random() < 0.3:
        return {"const": rng.choice(values)}
    return {"enum": rng.sample(values, rng.randint(1, 5))}


def check_schemas(llm: LLM, num_schemas: int, seed: int = 0) -> tuple[int, list[str]]:
    """Generate an output for each of `num_schemas` random schemas.

    Returns:
        The number of finished outputs, and the errors of finished outputs that break their schema.
    """
    rng = random.Random(seed)
    schemas = [random_schema(rng) for _ in range(num_schemas)]
    params = [
        SamplingParams(
            temperature=rng.choice([0.0, 0.7, 1.5]),
            seed=index,
            max_tokens=400,
            structured_outputs={"json": schema, "disable_any_whitespace": rng.random() < 0.5},
        )
        for index, schema in enumerate(schemas)
    ]
    outputs = llm.generate(["Describe it:"] * num_schemas, params, use_tqdm=False)
    num_finished, wrong = 0, []
    for schema, output in zip(schemas, outputs, strict=True):
        completion = output.outputs[0]
        if completion.finish_reason != "length":
            num_finished += 1
            try:
                Draft202012Validator(schema).validate(json.loads(completion.text))
            except (ValidationError, ValueError) as error:
                reason = str(error).splitlines()[0]
                wrong.append(f"{json.dumps(schema)}: {completion.text!r}: {reason}")
    return num_finished, wrong
