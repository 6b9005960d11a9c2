"""Small models that read pictures, with random weights, and what transformers computes of them."""

import json
from collections.abc import Sequence as Seq
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedModel

from nanovllm import SamplingParams, demo_model
from nanovllm.outputs import RequestOutput

PARAMS = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=0)


def noise(height: int, width: int, seed: int = 0) -> Image.Image:
    """Return a picture of random colours."""
    values = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(values)


def randomized(model: PreTrainedModel, seed: int = 0) -> PreTrainedModel:
    """Give a model weights that make all of its parts matter."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            values = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(0.25 * values if parameter.ndim > 1 else 1 + 0.3 * values)
    return model.float().eval()


def add_tokenizer(directory: Path, special: Seq[str], template: str) -> dict[str, int]:
    """Give a checkpoint the demo model's tokenizer with more special tokens, and a chat template;
    return the ids of these tokens.
    """
    own = Path(demo_model.MODEL)
    tokenizer = Tokenizer.from_file(str(own / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    tokenizer.save(str(directory / "tokenizer.json"))
    config = json.loads((own / "tokenizer_config.json").read_text())
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    (directory / "chat_template.jinja").write_text(template)
    return {token: tokenizer.token_to_id(token) for token in special}


def told(output: RequestOutput) -> tuple[list[int], float]:
    """Return the tokens of an answer, and the sum of their log-probabilities."""
    completion = output.outputs[0]
    assert completion.cumulative_logprob is not None
    return completion.token_ids, completion.cumulative_logprob
