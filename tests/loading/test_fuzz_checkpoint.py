"""1,000 mutations of the shipped model's files: each ends in our error or in a right answer.

Never in another exception, more than 2 s of CPU time, or 200 MB of memory. `FUZZ_EXAMPLES=5000
pytest tests/loading/test_fuzz_checkpoint.py` runs that many new mutations of each file instead
of 200.
"""

import json
import math
import os
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings, strategies as st

from nanovllm import LLM, NanoVLLMError, SamplingParams, demo_model
from nanovllm.models.model_config import ModelConfig

MAX_CPU_SECONDS = 2.0
MAX_WAIT_SECONDS = 60
"""Of a call that may be blocked; much more than it takes, because other processes run too."""
MAX_GROWTH = 200 * 2**20
TOKENS = [1019, 5, 300]
OPTIONS: dict[str, Any] = {"max_model_len": 64, "num_kvcache_blocks": 16, "kvcache_block_size": 16}
GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


def fuzz_settings(examples: int) -> settings:
    """Return hypothesis' settings for `examples` fixed examples, or FUZZ_EXAMPLES random ones."""
    return settings(
        max_examples=int(os.environ.get("FUZZ_EXAMPLES", examples)),
        deadline=None,
        database=None,
        derandomize="FUZZ_EXAMPLES" not in os.environ,
        suppress_health_check=list(HealthCheck),
    )


SETTINGS = fuzz_settings(30)

ORIGINALS = {
    path.name: path.read_bytes()
    for path in Path(demo_model.MODEL).iterdir()
    if path.suffix in {".json", ".safetensors"} and path.name != "tokenizer.json"
}
WEIGHTS = ORIGINALS["model.safetensors"]
HEADER_END = 8 + int.from_bytes(WEIGHTS[:8], "little")
HEADER = json.loads(WEIGHTS[8:HEADER_END])
INDEX = "model.safetensors.index.json"
ORIGINALS[INDEX] = json.dumps(
    {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(HEADER, "model.safetensors")}
).encode()

words = str.split
FIELDS = {
    "config.json": words(
        """rope_scaling rope_parameters quantization_config layer_types torch_dtype dtype
        model_type auto_map tokenizer_class eos_token_id partial_rotary_factor rope_theta
        original_max_position_embeddings sliding_window transformers_version"""
    ),
    "generation_config.json": words(
        """temperature top_k top_p min_p repetition_penalty max_new_tokens do_sample eos_token_id
        max_length"""
    ),
    "tokenizer_config.json": words(
        """tokenizer_class tokenizer_file vocab_file gguf_file auto_map vocab merges chat_template
        added_tokens_decoder extra_special_tokens model_specific_special_tokens padding_side
        truncation_side init_inputs tokenizer_object backend max_length bos_token unk_token
        add_bos_token add_eos_token tokenizer_padding tokenizer_truncation fix_mistral_regex
        fast_tokenizer_files _commit_hash split_special_tokens post_processor name_or_path is_local
        """
    ),
    INDEX: ["weight_map", "metadata"],
}
"""Names that a mutation may add: those that this package or transformers reads."""

# Values are JSON texts, so that they can be what json.dumps does not write.
SPECIAL = words(
    r"""null true false 0 -1 1 2 3 5 127 1024 1000000000 16777216 16777217 2147483648
    9223372036854775807 9223372036854775808 1e30 1e308 1e999 -1e999 1e-308 1e-40 0.5 -0.0 NaN
    Infinity -Infinity [] {} [null] [[]] "" "x" "NaN" "\u0000" "\ud800" "/dev/zero" "/etc/passwd"
    "../config.json" "model.safetensors" "config.json" "." "re:(a+)+$" "bfloat16" "float16" "int8"
    "qwen3" "t5" "LlamaTokenizer" "T5Tokenizer" "default" "linear" "yarn" "<|im_end|>" [-5] [1e999]
    ["x"] [1019,1021]"""
)
SPECIAL += ["1" + "0" * 30, "1" + "0" * 400, "9" * 5000, '"' + "x" * 100_000 + '"']
SPECIAL += ["[" * 100_000, '{"a":' * 100_000, "[" * 500 + "]" * 500, "[" + "1," * 100_000 + "1]"]
TEMPLATES = [
    "[{}]",
    '{{"a": {}}}',
    '{{"1000000000": {}}}',
    '{{"content": {}}}',
    '{{"AutoTokenizer": ["a--b.C", {}]}}',
    '{{"rope_type": "yarn", "factor": {}, "original_max_position_embeddings": 1024}}',
    '{{"rope_type": "yarn", "factor": 4.0, "beta_slow": {}}}',
    '{{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": {}}}',
    '{{"rope_type": "linear", "factor": {}}}',
    '{{"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": {}}}',
    '{{"rope_type": "factors", "factors": [{}]}}',
    '{{"rope_type": "default", "rope_theta": {}}}',
    '{{"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, {}]}}',
    '{{"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128], '
    '"modules_to_not_convert": ["model", {}]}}',
    '{{"quant_method": "compressed-tensors", "config_groups": {{"group_0": {}}}}}',
]


def json_texts() -> st.SearchStrategy[str]:
    """Return a strategy for values of every type, most of them wrong wherever they stand."""
    numbers = st.integers() | st.integers(-4, 4096) | st.floats()
    leaves = st.sampled_from(SPECIAL) | (numbers | st.text(max_size=8)).map(json.dumps)
    return leaves | st.builds(str.format, st.sampled_from(TEMPLATES), leaves)


def object_text(fields: list[tuple[str, str]]) -> str:
    return "{" + ", ".join(f"{json.dumps(name)}: {value}" for name, value in fields) + "}"


@st.composite
def edited_object(draw: Any, original: dict[str, Any], names: list[str]) -> str:
    """Return a JSON object with one to three fields set, added, dropped, doubled or renamed."""
    fields = [(name, json.dumps(value)) for name, value in original.items()]
    for _ in range(draw(st.integers(1, 3))):
        index = draw(st.integers(0, max(len(fields) - 1, 0)))
        action = draw(st.sampled_from(["set", "set", "add", "add", "drop", "double", "rename"]))
        if action == "add" or not fields:
            fields.append((draw(st.sampled_from(names) | st.text(max_size=5)), draw(json_texts())))
        elif action == "set":
            fields[index] = (fields[index][0], draw(json_texts()))
        elif action == "drop":
            del fields[index]
        elif action == "double":
            fields.append((fields[index][0], draw(json_texts())))
        else:
            fields[index] = (draw(st.sampled_from(names) | st.text(max_size=5)), fields[index][1])
    return object_text(fields)


@st.composite
def damaged(draw: Any, content: bytes) -> bytes:
    """Return `content` cut, or with some bytes inserted or replaced."""
    start = draw(st.integers(0, len(content)))
    if draw(st.booleans()):
        return content[:start]
    inserted = draw(st.binary(max_size=12) | st.sampled_from([b"\xef\xbb\xbf", b'"', b"{", b"9"]))
    return content[:start] + inserted + content[start + draw(st.integers(0, 12)) :]


@st.composite
def mutated_json(draw: Any, name: str) -> bytes:
    original = json.loads(ORIGINALS[name])
    if name == INDEX and draw(st.booleans()):
        some = dict(list(original["weight_map"].items())[: draw(st.integers(1, 3))])
        inner: str = draw(edited_object(some, ["model.norm.weight"]))
        return object_text([("weight_map", inner)]).encode(errors="surrogatepass")
    if draw(st.integers(0, 5)) == 0:
        content: bytes = draw(damaged(ORIGINALS[name]))
        return content
    return draw(edited_object(original, FIELDS[name])).encode(errors="surrogatepass")


@st.composite
def mutated_weights(draw: Any) -> bytes:
    """Return the weights with another header; the bytes after the header stay."""
    kinds = "entry entry entry header bytes length data order"
    kind = draw(st.sampled_from(words(kinds)))
    payload = WEIGHTS[HEADER_END:]
    header = WEIGHTS[8:HEADER_END]
    length = None
    if kind == "entry":
        tensor = draw(st.sampled_from([name for name in HEADER if name != "__metadata__"]))
        entry = dict(HEADER[tensor])
        field = draw(st.sampled_from(["dtype", "shape", "data_offsets", "any"]))
        if field == "dtype":
            dtypes = words("BOOL U8 I8 F8_E4M3 F8_E5M2 I16 F16 BF16 I32 F32 F64 I64 C64 X")
            entry["dtype"] = draw(st.sampled_from(dtypes))
        elif field == "shape":
            sizes = st.integers(0, 1024) | st.sampled_from([2**31, 2**62, 2**64, -1])
            entry["shape"] = draw(st.permutations(entry["shape"]) | st.lists(sizes, max_size=5))
        elif field == "data_offsets":
            offset = st.integers(0, len(payload)) | st.sampled_from([2**62, 2**64 - 1, 2**64, -1])
            entry["data_offsets"] = draw(st.lists(offset, max_size=3))
        text = json.dumps(entry)
        if field == "any":
            text = draw(edited_object(entry, ["dtype", "shape", "data_offsets"]))
        others = [(name, json.dumps(value)) for name, value in HEADER.items() if name != tensor]
        header = object_text([*others, (tensor, text)]).encode(errors="surrogatepass")
    elif kind == "header":
        names = ["lm_head.weight", "__metadata__", *HEADER]
        header = draw(edited_object(HEADER, names)).encode(errors="surrogatepass")
    elif kind == "bytes":
        header = draw(damaged(header))
    elif kind == "length":
        length = draw(st.integers(0, 2**64 - 1) | st.integers(-9, 9).map(len(header).__add__))
    elif kind == "order":
        shuffled = draw(st.permutations([name for name in HEADER if name != "__metadata__"]))
        entries = [(name, json.dumps(HEADER[name])) for name in shuffled]
        metadata = json.dumps({draw(st.text(max_size=5)): draw(st.text(max_size=9))})
        header = object_text([*entries, ("__metadata__", metadata)]).encode()
    else:
        payload = payload[: draw(st.integers(0, len(payload)))] + draw(st.binary(max_size=9))
    length = len(header) if length is None else length
    return length.to_bytes(8, "little") + header + payload


MUTATIONS = {
    **{name: mutated_json(name) for name in FIELDS},
    "model.safetensors": mutated_weights(),
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(shutil.copytree(demo_model.MODEL, tmp_path_factory.mktemp("fuzz") / "model"))


def answer(directory: Path) -> list[int]:
    """Load the model, use all that its files say, and return four tokens."""
    llm = LLM(str(directory), **OPTIONS)
    try:
        recommended = llm.get_default_sampling_params()
        assert math.isfinite(recommended.temperature)
        llm.generate("What is a KV cache?", SamplingParams(max_tokens=2), use_tqdm=False)
        (output,) = llm.generate(TOKENS, GREEDY, use_tqdm=False)
        return output.token_ids
    finally:
        llm.shutdown()


@pytest.fixture(scope="module")
def expected(directory: Path) -> list[int]:
    """The answer of the unchanged model; the process has then loaded all that loading needs."""
    return answer(directory)


def may_change_tokens(name: str, content: bytes) -> bool:
    """Return whether an accepted mutation may change the model that runs."""
    if name == "config.json":
        original = ModelConfig.from_hf(json.loads(ORIGINALS[name]))
        return ModelConfig.from_hf(json.loads(content)) != original
    if name == "model.safetensors":
        end = 8 + int.from_bytes(content[:8], "little")
        header = json.loads(content[8:end])
        tensors = {key: value for key, value in HEADER.items() if key != "__metadata__"}
        same = all(header.get(key) == value for key, value in tensors.items())
        return not same or content[end:] != WEIGHTS[HEADER_END:]
    return False


@pytest.fixture
def alarm() -> Iterator[None]:
    """Interrupt a call that waits for ever, such as one that opens a FIFO."""

    def stop(*_: Any) -> None:
        raise AssertionError(f"hangs for {MAX_WAIT_SECONDS} s")

    before = signal.signal(signal.SIGALRM, stop)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def memory(field: str) -> int:
    """Return VmRSS or VmHWM (its peak) of this process in bytes; 0 where there is no /proc."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return 0
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) * 1024


def measured(call: Callable[[], list[int]]) -> list[int] | NanoVLLMError:
    """Return what `call` returns, or our error, and check its time and memory."""
    if sys.platform == "linux":
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # resets VmHWM
    memory_before, time_before = memory("VmRSS"), time.process_time()
    signal.alarm(MAX_WAIT_SECONDS)
    try:
        return call()
    except NanoVLLMError as error:
        return error.with_traceback(None)
    finally:
        signal.alarm(0)
        assert time.process_time() - time_before < MAX_CPU_SECONDS
        assert memory("VmHWM") - memory_before < MAX_GROWTH


@pytest.mark.usefixtures("alarm")
@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mutation_gives_our_error_or_a_right_answer(
    directory: Path, expected: list[int], name: str
) -> None:
    count: Counter[str] = Counter()

    @SETTINGS
    @given(MUTATIONS[name])
    def run(content: bytes) -> None:
        assume(content != ORIGINALS[name])
        (directory / name).write_bytes(content)
        found = measured(lambda: answer(directory))
        if isinstance(found, NanoVLLMError):
            count["refused"] += 1
            assert len(str(found)) < 10_000
        elif may_change_tokens(name, content):
            count["another model"] += 1
            assert len(found) == len(expected)
        else:
            count["right"] += 1
            assert found == expected

    try:
        run()
    finally:
        (directory / name).unlink()
        if (Path(demo_model.MODEL) / name).exists():
            shutil.copy(Path(demo_model.MODEL) / name, directory)
    assert sum(count.values()) >= SETTINGS.max_examples
    assert min(count["refused"], count["right"]) >= SETTINGS.max_examples // 100
