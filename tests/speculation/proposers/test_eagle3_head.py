"""EAGLE-3: the head against a reference from the paper, and the features that its target stores."""

import dataclasses
import itertools
import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig

from nanovllm.attention.batch import Batch, HostLengths
from nanovllm.attention.selector import select_backend
from nanovllm.attention.spec import AttentionSpec
from nanovllm.errors import CheckpointError, UnsupportedModelError
from nanovllm.features.speculation.proposers.eagle3_head import capture_features, check_eagle3
from nanovllm.layers.attention import Attention
from nanovllm.loading.hub import open_checkpoint, weight_files
from nanovllm.models.model_config import ModelConfig
from nanovllm.models.registry import model_class
from nanovllm.options.config import Config
from nanovllm.platform.cpu import CPU as CPUPlatform
from nanovllm.utils import distributed
from nanovllm.utils.distributed import TensorParallel
from nanovllm.worker.model_loader import NetworkSpec, build_model, load_model
from tests.checkpoints import SMALL, make_checkpoint, random_model, read_json, write_json
from tests.closeness import assert_close
from tests.eagle3_checkpoints import change_tensors, make_eagle3_checkpoint
from tests.kernels.cpu.helpers import native

pytestmark = pytest.mark.usefixtures("inference_mode")

CPU = torch.device("cpu")
PLATFORM = CPUPlatform()
MAX_LENGTH = 128
UNSUPPORTED = UnsupportedModelError
LINEAR_ROPE = {"rope_type": "linear", "factor": 3.0}
CASES = {
    "plain": {},
    "whole vocabulary, one KV head, head_dim from hidden/heads": {
        "draft_vocab_size": None,
        "num_key_value_heads": 1,
        "head_dim": None,
    },
    "norm before residual, biases": {
        "norm_before_residual": True,
        "attention_bias": True,
        "mlp_bias": True,
    },
    "another hidden size, own embedding, head_dim below hidden/heads": {
        "hidden_size": 48,
        "target_hidden_size": 64,
        "own_embedding": True,
        "head_dim": 12,
    },
    "norms of queries and keys, rope of its own": {
        "qk_norm": True,
        "model_type": "qwen3",
        "rope_theta": 500_000.0,
        "rope_scaling": LINEAR_ROPE,
    },
    "norm before fc": {"norm_before_fc": True},
    "norms of features": {"fc_norm": True},
    "norm of what is fed back": {"norm_output": True, "norm_before_residual": True},
}


@pytest.fixture(scope="module")
def target_path(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("target"))


def load_target(path, dtype="float32", **options):
    """Return our model from a directory, and its config."""
    checkpoint = open_checkpoint(str(path))
    config, model_config = (
        Config(str(path), dtype=dtype, device="cpu", **options),
        ModelConfig.from_hf(checkpoint.config, dtype),
    )
    spec = NetworkSpec(config, model_config, weight_files(checkpoint, str(path)))
    kernels = PLATFORM.kernels(model_config.dtype)
    model = build_model(spec, MAX_LENGTH, CPU, kernels)
    load_model(model, spec, kernels)
    return model, model_config


def load_head(path, target, target_config, dtype="float32", **options):
    checkpoint = open_checkpoint(str(path))
    files = weight_files(checkpoint, str(path))
    config = Config("target", dtype=dtype, device="cpu", **options)
    return make_head(config, check_eagle3(checkpoint.config, target_config, files), files, target)


def make_head(config, head_config, files, target):
    kernels = PLATFORM.kernels(head_config.dtype)
    spec = NetworkSpec(config, head_config, files)
    head = build_model(spec, MAX_LENGTH, CPU, kernels)
    load_model(head, spec, kernels)
    head.share(target)
    return head


def target_ids(head, draft_ids):
    """Return the target's tokens of columns of the head's logits."""
    return draft_ids if head.d2t is None else head.d2t(draft_ids)


def bind(model, config):
    """Give the model's layers a KV cache of 40 blocks; return its backend."""
    dtype = config.dtype
    spec = AttentionSpec(
        config.num_heads, config.num_kv_heads, config.head_dim, dtype, CPU, block_size=32
    )
    backend = select_backend(spec, PLATFORM.attention_backends(PLATFORM.kernels(dtype)))
    for module in model.modules():
        if isinstance(module, Attention):
            module.bind(backend, torch.zeros(backend.kv_cache_shape(40), dtype=dtype))
    return backend


def make_batch(backend, rows):
    """Return the batch of rows (number of the sequence, tokens before, tokens).

    Sequence s has the blocks 37 - s, 36 - s - 10 and so on, of 32 tokens.
    """
    positions, slots, tables = [], [], []
    for sequence, start, tokens in rows:
        table = [37 - sequence - 10 * index for index in range(3)]
        where = range(start, start + len(tokens))
        positions += where
        slots += [table[position // 32] * 32 + position % 32 for position in where]
        tables.append(table)
    query_lens = tuple(len(tokens) for _, _, tokens in rows)
    seq_lens = tuple(start + len(tokens) for _, start, tokens in rows)
    batch = Batch(
        input_ids=torch.cat([torch.as_tensor(tokens) for _, _, tokens in rows]),
        positions=torch.tensor(positions),
        slot_mapping=torch.tensor(slots),
        cu_seqlens_q=torch.tensor([0, *itertools.accumulate(query_lens)], dtype=torch.int32),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        block_tables=torch.tensor(tables, dtype=torch.int32),
        lengths=HostLengths(query_lens, seq_lens),
    )
    return dataclasses.replace(batch, metadata=backend.plan(batch))


class Reference:
    """The head in plain torch: section 3 of the paper, and figure 6 for the layer.

    Args:
        tensors: of the checkpoint, by the authors' names.
        settings: a flat config.json.
        embedding: [vocab_size, hidden_size].
    """

    def __init__(self, tensors, settings, embedding):
        self.tensors, self.settings, self.embedding = tensors, settings, embedding

    def linear(self, name, x):
        return torch.nn.functional.linear(
            x, self.tensors[f"{name}.weight"], self.tensors.get(f"{name}.bias")
        )

    def norm(self, name, x):
        scale = (x.square().mean(-1, keepdim=True) + self.settings["rms_norm_eps"]).rsqrt()
        return x * scale * self.tensors[f"{name}.weight"]

    def rotate(self, x):
        """Rotate x [heads, T, head_dim] to the positions 0 to T - 1."""
        half = x.shape[-1] // 2
        speeds = self.settings["rope_theta"] ** (-torch.arange(half).double() / half)
        angles = torch.arange(x.shape[1])[:, None] * speeds
        angles = angles / (self.settings.get("rope_scaling") or {}).get("factor", 1.0)
        turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(
            torch.ones_like(angles), angles
        )
        return torch.cat([turned.real, turned.imag], -1)

    def attention(self, x):
        heads, kv_heads = (
            self.settings["num_attention_heads"],
            self.settings["num_key_value_heads"],
        )
        q, k, v = (
            self.linear(f"midlayer.self_attn.{name}_proj", x).unflatten(1, (count, -1))
            for name, count in (("q", heads), ("k", kv_heads), ("v", kv_heads))
        )
        if "midlayer.self_attn.q_norm.weight" in self.tensors:
            q = self.norm("midlayer.self_attn.q_norm", q)
            k = self.norm("midlayer.self_attn.k_norm", k)
        q, k, v = self.rotate(q.transpose(0, 1)), self.rotate(k.transpose(0, 1)), v.transpose(0, 1)
        k, v = (y.repeat_interleave(heads // kv_heads, 0) for y in (k, v))
        scores = q @ k.transpose(1, 2) / q.shape[-1] ** 0.5
        future = torch.ones(scores.shape[1:]).triu(1).bool()
        mixed = scores.masked_fill(future, -torch.inf).softmax(-1) @ v
        return self.linear("midlayer.self_attn.o_proj", mixed.transpose(0, 1).flatten(1))

    def combine(self, features):
        if self.settings.get("norm_before_fc"):
            features = self.norm("input_norm", features)
        if self.settings.get("fc_norm"):
            parts = enumerate(features.chunk(3, -1))
            features = torch.cat([self.norm(f"fc_norm.{i}", part) for i, part in parts], -1)
        return self.linear("fc", features)

    def forward(self, tokens, hidden):
        """Return the logits of the whole sequence, and what is fed back."""
        embeds = self.norm("midlayer.input_layernorm", self.embedding[torch.as_tensor(tokens)])
        normed = self.norm("midlayer.hidden_norm", hidden)
        residual = normed if self.settings.get("norm_before_residual") else hidden
        x = residual + self.attention(torch.cat([embeds, normed], -1))
        y = self.norm("midlayer.post_attention_layernorm", x)
        gate = self.linear("midlayer.mlp.gate_proj", y)
        x = x + self.linear(
            "midlayer.mlp.down_proj", gate * gate.sigmoid() * self.linear("midlayer.mlp.up_proj", y)
        )
        normed = self.norm("norm", x)
        return self.linear("lm_head", normed), normed if self.settings.get("norm_output") else x


def make_reference(path, settings, target):
    tensors = {
        name.removeprefix("model.").replace("layers.0.", "midlayer."): tensor.double()
        for name, tensor in load_file(path / "model.safetensors").items()
    }
    embedding = tensors.get("embed_tokens.weight")
    if embedding is None:
        embedding = load_file(Path(target) / "model.safetensors")[
            "model.embed_tokens.weight"
        ].double()
    return Reference(tensors, settings, embedding)


def flat_settings(path):
    config = read_json(path / "config.json")
    return {**config, **config.get("transformer_layer_config", {})}


def random_tokens(count, seed):
    return torch.randint(1003, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("case", CASES)
def test_logits_of_a_prompt_and_of_chained_steps(case, target_path, tmp_path):
    """Two sequences: their features in two steps, then six steps that are fed back."""
    form = ("raw", "speculators")[[*CASES].index(case) % 2]
    make_eagle3_checkpoint(tmp_path, target_path, form=form, **CASES[case])
    target, target_config = load_target(target_path)
    head = load_head(tmp_path, target, target_config)
    reference = make_reference(tmp_path, flat_settings(tmp_path), target_path)
    backend = bind(head, head.config)
    lengths, cuts, generator = (45, 33), (20, 32), torch.Generator().manual_seed(1)
    tokens = [random_tokens(length, seed) for seed, length in enumerate(lengths)]
    features = [torch.randn(length, 3 * 64, generator=generator) for length in lengths]
    expected = [reference.combine(part.double()) for part in features]
    outputs = [[], []]
    for first, last in (((0, 0), cuts), (cuts, lengths)):
        rows = [(s, first[s], tokens[s][first[s] : last[s]]) for s in range(2)]
        hidden = torch.cat([features[s][first[s] : last[s]] for s in range(2)])
        hidden = head(make_batch(backend, rows), head.combine(hidden))
        parts = hidden.split([len(row[2]) for row in rows])
        for output, part in zip(outputs, parts, strict=True):
            output.append(part)
    hidden = torch.stack([output[-1][-1] for output in outputs])
    d2t = load_file(tmp_path / "model.safetensors").get("d2t")
    for _ in range(6):
        chosen = head.compute_logits(hidden.clone()).argmax(-1)
        new = target_ids(head, chosen)
        assert torch.equal(new, chosen if d2t is None else chosen + d2t[chosen])
        for s, token in enumerate(new.tolist()):
            _, fed_back = reference.forward(tokens[s], expected[s])
            expected[s] = torch.cat([expected[s], fed_back[-1:]])
            tokens[s].append(token)
        rows = [(s, len(tokens[s]) - 1, tokens[s][-1:]) for s in range(2)]
        hidden = head(make_batch(backend, rows), hidden.clone())
        for s in range(2):
            outputs[s].append(hidden[s : s + 1])
    for s in range(2):
        logits, fed_back = reference.forward(tokens[s], expected[s])
        ours = torch.cat(outputs[s])
        assert_close(ours, fed_back, of_largest=1e-4)
        assert_close(head.compute_logits(ours), logits, of_largest=1e-4)


def test_both_forms_are_the_same_network(target_path, tmp_path, caplog):
    """Neither says a word about tensors that are not used."""
    target, target_config = load_target(target_path)
    logits = []
    caplog.set_level(logging.WARNING)
    for form in ("raw", "speculators"):
        make_eagle3_checkpoint(tmp_path / form, target_path, form=form, prefix="model.")
        head = load_head(tmp_path / form, target, target_config)
        batch = make_batch(bind(head, head.config), [(0, 0, random_tokens(9, 0))])
        hidden = torch.ones(9, 64)
        logits.append(head.compute_logits(head(batch, hidden)))
    assert torch.equal(*logits)
    assert not caplog.records


def test_ranks_add_their_parts_of_the_features(target_path, tmp_path, monkeypatch):
    make_eagle3_checkpoint(tmp_path, target_path)
    target, target_config = load_target(target_path)
    features = torch.randn(5, 3 * 64, generator=torch.Generator().manual_seed(0))
    whole = load_head(tmp_path, target, target_config).combine(features)
    monkeypatch.setattr(distributed.dist, "all_reduce", lambda x: None)
    parts = []
    for rank in range(2):
        monkeypatch.setattr(distributed, "_tensor_parallel", TensorParallel(rank, 2))
        parts.append(load_head(tmp_path, target, target_config).combine(features))
    assert_close(sum(parts), whole, atol=1e-5, rtol=1e-5)


# The features of the target


def make_target(path, model_type, num_layers=7, **changes):
    config = AutoConfig.for_model(
        model_type, **{**SMALL, "num_hidden_layers": num_layers, **changes}
    )
    model = random_model(config)
    model.save_pretrained(path)
    return model


def test_features_are_hidden_states_of_transformers(tmp_path):
    """hidden_states[i] of transformers is what enters layer i."""
    theirs = make_target(tmp_path, "llama")
    model, config = load_target(tmp_path)
    backend = bind(model, config)
    pool = torch.full((40 * 32, 3 * 64), torch.nan)
    capture_features(model, (2, 3, 6), pool)
    tokens = random_tokens(50, 0)
    model(make_batch(backend, [(1, 0, tokens[:35])]))
    last = make_batch(backend, [(1, 35, tokens[35:])])
    model(dataclasses.replace(last, output_indices=torch.tensor([14])))
    states = theirs(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    expected = torch.cat([states[2][0], states[3][0], states[6][0]], -1)
    slots = torch.cat([torch.arange(36 * 32, 37 * 32), torch.arange(26 * 32, 26 * 32 + 18)])
    assert_close(pool[slots], expected, of_largest=1e-4)
    pool[slots] = torch.nan
    assert pool.isnan().all(), "written where no token is"


@native
@pytest.mark.parametrize("case", ["norm before residual, biases", "norms of features"])
def test_head_with_the_c_kernels(case, target_path, tmp_path):
    """In bfloat16 it is near the reference."""
    make_eagle3_checkpoint(tmp_path, target_path, dtype=torch.bfloat16, **CASES[case])
    target, target_config = load_target(target_path, "bfloat16")
    head = load_head(tmp_path, target, target_config, "bfloat16")
    backend = bind(head, head.config)
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(12, 3 * 64, generator=generator).bfloat16()
    tokens = random_tokens(12, 0)
    hidden = head.combine(features)
    output = head(make_batch(backend, [(0, 0, tokens)]), hidden.clone())
    reference = make_reference(tmp_path, flat_settings(tmp_path), target_path)
    logits, _ = reference.forward(tokens, reference.combine(features.double()))
    error = head.compute_logits(output) - logits
    assert error.abs().max() < 0.05 * logits.abs().max()


# Configs


def read(config, target, **changes):
    target_config = {**read_json(Path(target) / "config.json"), **changes}
    return check_eagle3(config, ModelConfig.from_hf(target_config), [])


@pytest.mark.parametrize("form", ["raw", "speculators"])
def test_layers_whose_inputs_are_features(form, target_path, tmp_path):
    name = "eagle_aux_hidden_state_layer_ids"
    make_eagle3_checkpoint(tmp_path, target_path, form=form, **{name: None})
    config = read_json(tmp_path / "config.json")
    assert read(config, target_path, num_hidden_layers=28).layer_ids == (2, 14, 25)
    assert read(config, target_path, num_hidden_layers=7).layer_ids == (2, 3, 4)
    with pytest.raises(CheckpointError, match=f"has no {name}.* at least 7 layers.* has 6"):
        read(config, target_path, num_hidden_layers=6)
    assert read({**config, name: [0, 1, 2]}, target_path).layer_ids == (0, 1, 2)
    for wrong in ([0, 1], [0, 1, 2, 3], [2, 1, 0], [0, 0, 1], [0, 1, 3], [-1, 0, 1], "2", [True]):
        with pytest.raises(CheckpointError, match=name):
            read({**config, name: wrong}, target_path)


def test_eagle_config_counts_in_outputs(target_path, tmp_path):
    """The output of layer 1 is what enters layer 2: SGLang's [1, 46, 90] is vLLM's [2, 47, 91]."""
    name = "eagle_aux_hidden_state_layer_ids"
    make_eagle3_checkpoint(tmp_path, target_path, **{name: None})
    config = read_json(tmp_path / "config.json")
    config["eagle_config"] = {"use_aux_hidden_state": True, name: [1, 46, 90]}
    assert read(config, target_path, num_hidden_layers=94).layer_ids == (2, 47, 91)
    with pytest.raises(CheckpointError, match="from 0 to 88, got 90"):
        read(config, target_path, num_hidden_layers=90)
    assert read({**config, name: [2, 47, 91]}, target_path, num_hidden_layers=94)
    with pytest.raises(CheckpointError, match="contradicts"):
        read({**config, name: [1, 46, 90]}, target_path, num_hidden_layers=94)


@pytest.mark.parametrize(
    ("error", "changes", "message"),
    [
        (UNSUPPORTED, {"architectures": ["MedusaModel"]}, "'MedusaModel' is not an EAGLE-3 head"),
        (UNSUPPORTED, {"model_type": "llama4_text"}, "model_type 'llama4_text'"),
        (UNSUPPORTED, {"num_hidden_layers": 2}, "num_hidden_layers 2"),
        (UNSUPPORTED, {"logit_scale": 0.5}, "logit_scale 0.5"),
        (UNSUPPORTED, {"eagle_config": {"use_aux_hidden_state": False}}, "_hidden_state False"),
        (UNSUPPORTED, {"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        (UNSUPPORTED, {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        (UNSUPPORTED, {"rope_scaling": {"rope_type": "dynamic", "factor": 2}}, "rope scaling 'dyn"),
        (UNSUPPORTED, {"use_sliding_window": True}, "sliding-window"),
        (CheckpointError, {"hidden_size": 96}, "for a model with hidden_size 96, but .* has 64"),
        (CheckpointError, {"target_hidden_size": 128}, "with hidden_size 128, but .* has 64"),
        (
            CheckpointError,
            {"hidden_size": 96, "target_hidden_size": 64},
            "hidden_size 96 and no embed_tokens",
        ),
        (
            CheckpointError,
            {"vocab_size": 1000, "draft_vocab_size": 10},
            "of 1000 tokens, but .* has 1003",
        ),
        (CheckpointError, {"draft_vocab_size": 2000}, "must be an integer from 1 to 1003"),
        (CheckpointError, {"norm_before_residual": "yes"}, "residual must be True or False"),
        (CheckpointError, {"eagle_config": [1]}, "eagle_config must be an object"),
    ],
    ids=str,
)
def test_what_is_refused(error, changes, message, target_path, tmp_path):
    make_eagle3_checkpoint(tmp_path, target_path)
    with pytest.raises(error, match=message):
        read({**read_json(tmp_path / "config.json"), **changes}, target_path)


def test_forms_of_speculators_that_are_no_eagle3(target_path, tmp_path):
    make_eagle3_checkpoint(tmp_path, target_path, form="speculators")
    config = read_json(tmp_path / "config.json")
    with pytest.raises(UnsupportedModelError, match="speculators_model_type 'dflash'"):
        read({**config, "speculators_model_type": "dflash"}, target_path)
    with pytest.raises(CheckpointError, match="transformer_layer_config must be an object"):
        read({**config, "transformer_layer_config": None}, target_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"midlayer__hidden_norm__weight": None}, "missing midlayer.hidden_norm.weight"),
        ({"d2t": None}, "missing d2t"),
        ({"mask_hidden": torch.zeros(1, 192)}, "unexpected mask_hidden"),
        ({"fc__weight": torch.zeros(64, 128)}, "misshapen fc.weight"),
        ({"d2t": torch.zeros(334)}, "d2t has dtype F32, must have I64 or I32"),
        ({"layers__0__hidden_norm__weight": torch.zeros(64)}, "unexpected layers.0.hidden_norm"),
    ],
    ids=str,
)
def test_a_tensor_that_does_not_match_is_named(changes, message, target_path, tmp_path):
    make_eagle3_checkpoint(tmp_path, target_path)
    change_tensors(tmp_path, **changes)
    target, target_config = load_target(target_path)
    with pytest.raises(CheckpointError, match=message):
        load_head(tmp_path, target, target_config)


@pytest.mark.parametrize("difference", [-1, 2**62])
def test_draft_ids_that_are_no_tokens(difference, target_path, tmp_path):
    make_eagle3_checkpoint(tmp_path, target_path)
    d2t = torch.zeros(334, dtype=torch.int64)
    d2t[0] = difference
    change_tensors(tmp_path, d2t=d2t)
    target, target_config = load_target(target_path)
    message = f"d2t: draft id 0 stands for token {difference}"
    with pytest.raises(CheckpointError, match=message):
        load_head(tmp_path, target, target_config)


def test_a_trained_embedding_must_be_there(target_path, tmp_path):
    """And the residual of speculators is normalised unless it says otherwise."""
    make_eagle3_checkpoint(tmp_path, target_path, form="speculators")
    config = read_json(tmp_path / "config.json")
    assert not read(config, target_path).norm_before_residual
    del config["norm_before_residual"]
    assert read(config, target_path).norm_before_residual
    write_json(tmp_path / "config.json", {**config, "embed_requires_grad": True})
    target, target_config = load_target(target_path)
    with pytest.raises(CheckpointError, match="missing embed_tokens.weight"):
        load_head(tmp_path, target, target_config)


def test_a_head_is_no_model_of_its_own(target_path, tmp_path, make_llm):
    make_eagle3_checkpoint(tmp_path, target_path, own_embedding=True)
    with pytest.raises(UnsupportedModelError, match="is a draft head: name its target"):
        make_llm(tmp_path, device="cpu")
    config = ModelConfig.from_hf(read_json(tmp_path / "config.json"))
    with pytest.raises(UnsupportedModelError, match="draft head"):
        model_class(config)


def test_dummy_weights(target_path, tmp_path):
    make_eagle3_checkpoint(tmp_path, target_path)
    target, _ = load_target(target_path)
    head_config = read(read_json(tmp_path / "config.json"), target_path)
    config = Config("target", device="cpu", load_format="dummy")
    head = make_head(config, head_config, [], target)
    assert target_ids(head, torch.tensor([0, 333])).tolist() == [0, 333]
    assert head.combine(torch.ones(2, 3 * 64)).isfinite().all()
