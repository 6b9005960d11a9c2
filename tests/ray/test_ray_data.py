"""Ray Data with an engine in each actor, and pictures in its columns."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nanovllm import LLM
from tests.vision.conftest import FEW, qwen  # noqa: F401 (a fixture)
from tests.vision.pictures import PARAMS, noise, told
from tests.vision.qwen import PICTURE

PROMPT = f"{PICTURE}What is it?"


class Answers:
    """What is given to `map_batches`."""

    def __init__(self, model: str) -> None:
        self.llm = LLM(model, dtype="bfloat16", **FEW)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        prompts = [
            {"prompt": PROMPT, "multi_modal_data": {"image": image}} for image in batch["image"]
        ]
        outputs = self.llm.generate(prompts, PARAMS, use_tqdm=False)
        return {"tokens": [output.outputs[0].token_ids for output in outputs]}


@pytest.mark.long
def test_columns_of_pictures(
    ray_cluster: Any,
    qwen: Callable[[str], Path],  # noqa: F811
    tmp_path: Path,
) -> None:
    """As files, arrays of one or several sizes, paths, and PIL images."""
    import ray.data

    model = str(qwen("qwen3_vl"))
    pictures = [noise(24, 40, 5), noise(33, 21, 6)]
    paths = []
    for index, picture in enumerate(pictures):
        picture.save(path := tmp_path / f"{index}.png")
        paths.append(str(path))
    llm = LLM(model, dtype="bfloat16", **FEW)
    given: Any = [{"prompt": PROMPT, "multi_modal_data": {"image": each}} for each in pictures]
    expected = [told(output)[0] for output in llm.generate(given, PARAMS, use_tqdm=False)]
    llm.shutdown()
    columns = [
        [Path(path).read_bytes() for path in paths],
        [np.asarray(picture) for picture in pictures],
        paths,
        pictures,
    ]
    rows = [{"image": image} for column in columns for image in column]
    found = ray.data.from_items(rows, override_num_blocks=1).map_batches(
        Answers, fn_constructor_args=(model,), concurrency=1, batch_size=2
    )
    assert [list(row["tokens"]) for row in found.take_all()] == expected * len(columns)
