"""Runs a layer with state alone: loaded from transformers' tensors, with a pool of its own."""

import dataclasses
import math
import random

import torch
from safetensors.torch import save_file
from torch import nn

from nanovllm.attention.batch import Batch
from nanovllm.loading.loader import load_weights
from nanovllm.utils.distributed import TensorParallel
from tests.closeness import assert_close
from tests.kernels.state_cases import make_rows, make_states

PAGES = [[0, 5, 2], [4, 1, 3], [7, 6, 8]]
"""Of three sequences."""


def randomize(module):
    """Give transformers' `module` random parameters; return it."""
    generator = torch.Generator().manual_seed(3)
    for name, parameter in module.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        matrix = parameter.ndim > 1
        parameter.data = noise * 1.5 / math.sqrt(parameter.shape[-1]) if matrix else 0.5 * noise
        if name == "norm.weight":
            parameter.data += 1.5
    return module.requires_grad_(False)


def load(module, theirs, path):
    """Load our `module` from the tensors of `theirs`, whose name there is "mixer"."""
    tensors = {f"mixer.{name}": value.contiguous() for name, value in theirs.state_dict().items()}
    save_file(tensors, path / "model.safetensors")
    holder = nn.Module()
    holder.mixer = module
    load_weights(holder, [path / "model.safetensors"], progress=False)
    return module.requires_grad_(False)


def on_ranks(monkeypatch, num_ranks, *modules):
    """Yield while this process is each of the ranks in turn, for what files of layers make."""
    for rank in range(num_ranks):
        here = TensorParallel(rank, num_ranks)
        for place in ("nanovllm.layers.linear", "nanovllm.layers.pieces", *modules):
            monkeypatch.setattr(f"{place}.tensor_parallel", lambda here=here: here)
        yield rank


def assert_as_transformers(make, theirs, hidden_size, on_each_rank, path, stored=None):
    """Check rows side by side, cut into steps anywhere; the ranks' outputs add up.

    Args:
        make: makes our layer on a rank.
        on_each_rank: from `on_ranks`.
        stored: has the tensors of `theirs` under other names.
    """
    sequences = inputs(hidden_size)
    total = [0.0] * len(sequences)
    for rank in on_each_rank:
        found = run_in_steps(load(make(), stored or theirs, path), sequences, rank)
        total = [before + here for before, here in zip(total, found, strict=True)]
    for tokens, found in zip(sequences, total, strict=True):
        expected = theirs(tokens[None])
        assert_close(found, expected[0], of_largest=1e-5)


def inputs(hidden_size, lengths=(70, 1, 9)):
    """Return the tokens of three sequences."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(length, hidden_size, generator=generator) for length in lengths]


def run_in_steps(mixer, sequences, seed):
    """Return the outputs for the sequences, all in each step, cut at random places."""
    mixer.bind(make_states(list(mixer.parts), 9, 3))
    mixer.states.pool.zero_()
    chooser, done = random.Random(seed), [0] * len(sequences)
    outputs = [[] for _ in sequences]
    while any(len(tokens) > start for tokens, start in zip(sequences, done, strict=True)):
        rows = []
        for index, tokens in enumerate(sequences):
            left = len(tokens) - done[index]
            if left:
                rows.append((index, chooser.choice([left, 1, min(left, 7), (left + 1) // 2])))
        chooser.shuffle(rows)
        for (index, _), out in zip(rows, _step(mixer, sequences, done, rows), strict=True):
            outputs[index].append(out)
        for index, length in rows:
            done[index] += length
    return [torch.cat(parts) for parts in outputs]


def _step(mixer, sequences, done, rows):
    lengths = [length for _, length in rows]
    parts = [sequences[index][done[index] : done[index] + length] for index, length in rows]
    hidden, state = torch.cat(parts), make_rows([PAGES[index] for index, _ in rows], lengths)
    empty = torch.empty(0)
    batch = Batch(empty, empty, empty, empty, empty, empty, state=state)
    before = mixer.states.pool.clone()
    last = state.cu_seqlens[1:].long() - 1
    some = mixer(hidden, dataclasses.replace(batch, output_indices=last))
    mixer.states.pool.copy_(before)
    out = mixer(hidden, batch)
    assert_close(some, out[last], rtol=1e-5, atol=1e-5)
    return out.split(lengths)
