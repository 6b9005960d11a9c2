"""Mutations of an adapter's files: each ends in our error or in tokens, and the engine goes on.

As tests/loading/test_fuzz_checkpoint.py, with the same limits. `FUZZ_EXAMPLES=2000 pytest
tests/lora/test_fuzz_adapters.py` runs that many new mutations of each file.
"""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, strategies as st

from nanovllm import LLM, NanoVLLMError, demo_model
from nanovllm.errors import InvalidRequestError
from nanovllm.options.lora_request import LoRARequest
from tests.loading.test_fuzz_checkpoint import (  # noqa: F401 - a fixture
    GREEDY,
    OPTIONS,
    TOKENS,
    alarm,
    damaged,
    edited_object,
    fuzz_settings,
    measured,
)
from tests.lora.adapters import PEFT_CONFIG, linears_of, write_adapter

SETTINGS = fuzz_settings(20)
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
FIELDS = [*PEFT_CONFIG, "rank_pattern", "alpha_pattern", "r", "lora_alpha", "a_field_of_next_year"]
PATTERNS = (
    *("q_proj", "layers.0.self_attn.q_proj", ".*_proj", r"^model\.layers\.[01].*", "(a+)+$", "("),
    *("a?" * 60 + "a" * 60, ".*.*.*x", r"(\w{99}){99}", "", "\u0000", "x" * 5000),
)


@st.composite
def mutated_config(draw: Any, original: dict[str, Any]) -> bytes:
    """Return the config with fields edited, another pattern, or bytes damaged."""
    kind = draw(st.sampled_from(["fields", "fields", "pattern", "pattern", "bytes"]))
    if kind == "bytes":
        content: bytes = draw(damaged(json.dumps(original).encode()))
        return content
    if kind == "pattern":
        field = draw(st.sampled_from(["rank_pattern", "alpha_pattern"]))
        numbers = st.sampled_from([4, 8, 0, -1, 2**40, 0.5, None, "4"])
        keys = st.lists(st.sampled_from(PATTERNS), max_size=3)
        changed = {**original, field: {key: draw(numbers) for key in draw(keys)}}
        return json.dumps(changed).encode()
    edited: str = draw(edited_object(original, FIELDS))
    return edited.encode(errors="surrogatepass")


@st.composite
def mutated_weights(draw: Any, original: bytes) -> bytes:
    """Return the weights with another header, or with bytes damaged anywhere."""
    end = 8 + int.from_bytes(original[:8], "little")
    header = json.loads(original[8:end])
    kinds = ["entry", "name", "header", "bytes", "numbers", "numbers", "numbers"]
    kind = draw(st.sampled_from(kinds))
    if kind == "bytes":
        content: bytes = draw(damaged(original))
        return content
    if kind == "numbers":  # NaN, infinite, or just others
        start = draw(st.integers(end, len(original) - 4))
        return original[:start] + draw(st.binary(min_size=4, max_size=4)) + original[start + 4 :]
    name = draw(st.sampled_from([name for name in header if name != "__metadata__"]))
    if kind == "name":
        places = ["lm_head", "model.layers.99.mlp.up_proj", "x", "\u0000", "model.norm"]
        ends = [".lora_A.weight", ".lora_B.weight", ".lora_magnitude_vector", ""]
        other = draw(st.sampled_from(places)) + draw(st.sampled_from(ends))
        header[draw(st.sampled_from(["", "base_model.model."])) + other] = header.pop(name)
        text = json.dumps(header)
    elif kind == "entry":
        sizes = st.lists(st.sampled_from([0, 1, 4, 8, 128, 384, 2**31, 2**62, -1]), max_size=3)
        dtypes = st.sampled_from(["F16", "BF16", "F32", "I64", "U8", "BOOL", "F8_E4M3", "X"])
        entry = header[name]
        header[name] = {
            "dtype": draw(st.just(entry["dtype"]) | dtypes),
            "shape": draw(st.just(entry["shape"][::-1]) | sizes),
            "data_offsets": entry["data_offsets"],
        }
        text = json.dumps(header)
    else:
        text = draw(edited_object(header, list(header)))
    content = text.encode(errors="surrogatepass")
    return len(content).to_bytes(8, "little") + content + original[end:]


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("adapter")
    linears = linears_of(demo_model.MODEL, ("q_proj", "up_proj"))
    rank_of = {"q_proj": 4, "up_proj": 8}
    write_adapter(
        path,
        linears,
        rank_of=lambda linear: rank_of[linear.rpartition(".")[2]],
        r=4,
        rank_pattern={"up_proj": 8},
    )
    return path


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    llm = LLM(demo_model.MODEL, enable_lora=True, max_lora_rank=8, **OPTIONS)
    yield llm
    llm.shutdown()


@pytest.mark.usefixtures("alarm")
@pytest.mark.parametrize("name", [CONFIG, WEIGHTS])
def test_a_mutation_gives_our_error_or_tokens(llm: LLM, adapter: Path, name: str) -> None:
    original = (adapter / name).read_bytes()
    mutations: Any = mutated_weights(original)
    if name == CONFIG:
        mutations = mutated_config(json.loads(original))
    count: Counter[str] = Counter()
    request = LoRARequest("mutated", 1, str(adapter), load_inplace=True)

    def tokens(**adapted: Any) -> list[int]:
        (output,) = llm.generate(TOKENS, GREEDY, use_tqdm=False, **adapted)
        assert output.finish_reason == "length"
        return output.token_ids

    alone = tokens()
    expected = tokens(lora_request=request)

    @SETTINGS
    @given(mutations)
    def run(content: bytes) -> None:
        assume(content != original)
        (adapter / name).write_bytes(content)
        found = measured(lambda: tokens(lora_request=request))
        if isinstance(found, NanoVLLMError):
            count["refused"] += 1
            assert isinstance(found, InvalidRequestError)
            assert len(str(found)) < 10_000
        else:
            count["taken"] += 1
            assert len(found) == len(expected)
        assert tokens() == alone

    try:
        run()
    finally:
        (adapter / name).write_bytes(original)
    assert tokens(lora_request=request) == expected
    assert sum(count.values()) >= SETTINGS.max_examples
    assert min(count["refused"], count["taken"]) >= SETTINGS.max_examples // 100
