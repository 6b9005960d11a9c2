"""Mutations of a small GGUF file: each ends in our error or in a right answer.

As test_fuzz_checkpoint.py, with the same limits. `FUZZ_EXAMPLES=2000 pytest
tests/loading/test_fuzz_gguf.py` runs that many new mutations instead of 100.
"""

import struct
from collections import Counter
from pathlib import Path
from typing import Any

import gguf
import pytest
from hypothesis import assume, given, strategies as st

from nanovllm import LLM, NanoVLLMError, SamplingParams
from tests.gguf_files import make_gguf
from tests.loading.test_fuzz_checkpoint import alarm, damaged, fuzz_settings, measured  # noqa: F401 - a fixture

SETTINGS = fuzz_settings(100)
TOKENS = [259, 5, 30]
OPTIONS: dict[str, Any] = {"max_model_len": 64, "num_kvcache_blocks": 16, "kvcache_block_size": 16}
GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
SPECIAL = [0, 1, 2, 3, 8, 9, 12, 13, 31, 32, 33, 255, 4096, 2**20, 2**31, 2**32, 2**40, 2**62]
SPECIAL += [2**63 - 1, 2**63, 2**64 - 1]


class Original:
    """The unchanged file, and where the parts of its header are."""

    def __init__(self, file: Path) -> None:
        self.content = file.read_bytes()
        reader = gguf.GGUFReader(file)
        self.data_offset = reader.data_offset
        parts = {name: field for name, field in reader.fields.items() if "GGUF." not in name}
        self.fields = self._spans(parts.values())
        self.tensors = self._spans(tensor.field for tensor in reader.tensors)
        # The three numbers after the magic, then lengths, types, dimensions, offsets and values.
        self.numbers = [(4, 4), (8, 8), (16, 8)]
        for field in [*parts.values(), *(tensor.field for tensor in reader.tensors)]:
            offset = field.offset
            for part in field.parts[:12]:
                if part.dtype.itemsize > 1 or part.size == 1:
                    size = part.dtype.itemsize
                    self.numbers += [(offset + i * size, size) for i in range(part.size)]
                offset += part.nbytes

    def _spans(self, fields: Any) -> list[tuple[int, int]]:
        return [(f.offset, f.offset + sum(part.nbytes for part in f.parts)) for f in fields]


@st.composite
def mutated(draw: Any, original: Original) -> bytes:
    """Return the file with numbers of its header replaced, entries moved, or bytes damaged."""
    content = bytearray(original.content)
    kinds = ["number", "number", "number", "entry", "bytes", "header", "data", "cut"]
    kind = draw(st.sampled_from(kinds))
    if kind == "number":
        for _ in range(draw(st.integers(1, 3))):
            start, size = draw(st.sampled_from(original.numbers))
            old = int.from_bytes(content[start : start + size], "little")
            near = st.integers(-40, 40).map(old.__add__)
            number = draw(st.sampled_from(SPECIAL) | near | st.integers(0, 2**64 - 1))
            content[start : start + size] = (number % 2 ** (8 * size)).to_bytes(size, "little")
    elif kind == "entry":
        at, spans = draw(st.sampled_from([(16, original.fields), (8, original.tensors)]))
        start, stop = draw(st.sampled_from(spans))
        place, _ = draw(st.sampled_from(spans))
        entry = bytes(content[start:stop])
        action = draw(st.sampled_from(["drop", "double", "move"]))
        if action != "drop":
            content[place:place] = entry
            start, stop = (
                (start, stop) if place > start else (start + len(entry), stop + len(entry))
            )
        if action != "double":
            del content[start:stop]
        if draw(st.integers(0, 3)):  # else the count is wrong
            (count,) = struct.unpack_from("<Q", content, at)
            count += {"drop": -1, "double": 1, "move": 0}[action]
            struct.pack_into("<Q", content, at, count)
    elif kind == "header":
        header: bytes = draw(damaged(original.content[: original.data_offset]))
        return header + original.content[original.data_offset :]
    elif kind == "bytes":
        return bytes(draw(damaged(original.content)))
    elif kind == "data":
        start = draw(st.integers(original.data_offset, len(content)))
        noise = draw(st.binary(min_size=1, max_size=9))
        content[start : start + len(noise)] = noise
    else:
        return bytes(content[: draw(st.integers(0, len(content)))])
    return bytes(content)


def answer(file: Path) -> list[int]:
    """Load the model, use its tokenizer and its template, and return four tokens."""
    llm = LLM(str(file), **OPTIONS)
    try:
        if llm.get_tokenizer() is not None:
            llm.generate("hello 12", SamplingParams(max_tokens=2), use_tqdm=False)
        (output,) = llm.generate(TOKENS, GREEDY, use_tqdm=False)
        return output.outputs[0].token_ids
    finally:
        llm.shutdown()


@pytest.mark.usefixtures("alarm")
def test_a_mutation_gives_our_error_or_a_right_answer(tmp_path: Path) -> None:
    sizes = {"vocab_size": 270, "hidden_size": 64, "intermediate_size": 64, "head_dim": 32}
    heads = {"num_attention_heads": 2, "num_hidden_layers": 1}
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    kinds = {"output.weight": "Q5_1", "blk.0.ffn_down.weight": "Q4_1"}
    file = Path(
        make_gguf(tmp_path, "llama", "Q8_0", kinds=kinds, tokens=tokens, **sizes, **heads)[0]
    )
    original = Original(file)
    expected = answer(file)
    count: Counter[str] = Counter()

    @SETTINGS
    @given(mutated(original))
    def run(content: bytes) -> None:
        assume(content != original.content)
        file.write_bytes(content)
        found = measured(lambda: answer(file))
        if isinstance(found, NanoVLLMError):
            count["refused"] += 1
            assert len(str(found)) < 10_000
        else:
            count["right" if found == expected else "another model"] += 1
            assert len(found) <= len(expected)  # fewer: a shorter context, or NaN in a weight

    run()
    assert sum(count.values()) >= SETTINGS.max_examples
    assert min(count["refused"], count["right"]) >= SETTINGS.max_examples // 100
