"""Mutations of quantization_config, with the tensors of its format: our error or finite logits.

`FUZZ_EXAMPLES=2000 pytest tests/quantization/test_fuzz_settings.py` runs that many for each format.
"""

import copy
import json
import time
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from nanovllm.errors import NanoVLLMError
from tests.checkpoints import make_checkpoint, read_json, write_json
from tests.loading.test_fuzz_checkpoint import (
    MAX_GROWTH,
    SPECIAL,
    fuzz_settings,
    memory,
)
from tests.models.comparison import run_in_chunks
from tests.quantization import quantised
from tests.quantization.float_checkpoints import make_compressed, make_modelopt, scheme_of
from tests.quantization.integer_cases import BY_LAYOUT, CASES

FORMATS = [*BY_LAYOUT, "NVFP4", "FP8", "ModelOpt NVFP4"]
WORDS = ["group", "channel", "tensor", "float", "re:.*", "Linear", "static", "gptq_v2", "NVFP4"]
VALUES = [*map(json.dumps, WORDS), *(text for text in SPECIAL if len(text) < 2000)]
MAX_CPU_SECONDS = 2.0


def values():
    """Return a strategy for parsed values; what is not JSON for Python is left out."""
    found = []
    for text in VALUES:
        try:
            found.append(json.loads(text))
        except ValueError:
            continue
    small = st.integers(-4, 512) | st.booleans() | st.floats(allow_nan=False)
    leaf = st.sampled_from(found) | small
    return leaf | st.lists(leaf, max_size=3)


def objects(value):
    """Yield all objects inside `value`, itself included."""
    if isinstance(value, dict):
        yield value
        for inner in value.values():
            yield from objects(inner)


@pytest.fixture(scope="module")
def sound(random_model, tmp_path_factory):
    path = tmp_path_factory.mktemp("fuzz_settings")
    model = make_checkpoint(path / "model", **quantised.SIZES)
    found = {k: quantised.write(model, path / k, *CASES[name])[0] for k, name in BY_LAYOUT.items()}
    found["NVFP4"] = make_compressed(random_model, path / "NVFP4", scheme_of("NVFP4"))[0]
    found["FP8"] = make_compressed(random_model, path / "FP8", scheme_of("FP8_DYNAMIC"))[0]
    found["ModelOpt NVFP4"] = make_modelopt(random_model, path / "MN", "NVFP4")[0]
    return found


@pytest.mark.parametrize("name", FORMATS)
def test_a_mutation_gives_our_error_or_logits(name, sound, tmp_path):
    directory = tmp_path / "model"
    directory.mkdir()
    for file in Path(sound[name]).iterdir():
        (directory / file.name).symlink_to(file)
    config = read_json(directory / "config.json")
    (directory / "config.json").unlink()
    refused = []

    @fuzz_settings(12)
    @given(st.data())
    def run(data):
        changed = copy.deepcopy(config)
        for _ in range(data.draw(st.integers(1, 2), label="changes")):
            where = data.draw(
                st.sampled_from(list(objects(changed["quantization_config"]))), label="object"
            )
            key = data.draw(st.sampled_from([*where, "ignore", "dynamic"]), label="key")
            if data.draw(st.integers(0, 4), label="0 removes the key") == 0:
                where.pop(key, None)
            else:
                where[key] = data.draw(values(), label="value")
            if not changed["quantization_config"]:
                break
        write_json(directory / "config.json", changed)
        before, start = memory("VmRSS"), time.process_time()
        try:
            (logits,) = run_in_chunks(str(directory), [[5, 7, 11]], [3], 16, "bfloat16")
            assert logits.isfinite().all()
        except NanoVLLMError as error:
            refused.append(str(error))
        assert time.process_time() - start < MAX_CPU_SECONDS
        assert memory("VmRSS") - before < MAX_GROWTH

    run()
    assert 0 < max(map(len, refused)) < 10_000
