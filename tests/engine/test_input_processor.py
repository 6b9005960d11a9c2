"""What makes requests: the compiler of grammars is made once, when a request first has one."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from nanovllm import demo_model
from nanovllm.engine.input_processor import InputProcessor
from nanovllm.loading.hub import open_checkpoint
from nanovllm.loading.tokenizer import serving_tokenizer


class Compiler:
    def __init__(self) -> None:
        self.params: list[Any] = []

    def compile(self, params: Any) -> None:
        self.params.append(params)

    def is_compiled(self, params: Any) -> bool:
        return params in self.params


def test_grammars_are_made_once_when_needed() -> None:
    made = []

    def make() -> Compiler:
        made.append(Compiler())
        return made[-1]

    tokenizer = serving_tokenizer(open_checkpoint(demo_model.MODEL))
    limits: dict[str, Any] = {"vocab_size": 10**6, "max_model_len": 64, "seed": 0}
    processor = InputProcessor(tokenizer, make_grammars=make, **limits)
    processor.make_request("Hi")
    assert not made
    with ThreadPoolExecutor(8) as pool:
        found = set(pool.map(lambda _: processor.grammars, range(64)))
    assert found == set(made)
    assert len(made) == 1
    assert InputProcessor(None, make_grammars=make, **limits).grammars is None
