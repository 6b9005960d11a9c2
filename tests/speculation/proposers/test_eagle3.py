"""EAGLE-3: a head's drafts beside a reference from the paper, in any steps; what is refused.

tests/test_speculation.py has what all proposers promise.
"""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from nanovllm import SamplingParams
from nanovllm.errors import CheckpointError, UnsupportedModelError
from nanovllm.features.speculation.proposers.eagle3_head import check_eagle3
from nanovllm.models.model_config import ModelConfig
from nanovllm.models.registry import model_class
from tests.checkpoints import read_json, write_json
from tests.eagle3_checkpoints import change_tensors, make_eagle3_checkpoint
from tests.helpers import generate_all, random_prompt
from tests.kernels.cpu.helpers import native
from tests.speculation.proposers.drafting import (
    NATIVE,
    PREEMPTING,
    acceptance,
    allow_all,
    make_requests,
    run,
    speculating,
    watch_drafts,
)

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


class Reference:
    """The head in plain torch: section 3 of the paper, and figure 6 for the layer.

    Args:
        tensors: of the checkpoint, by the authors' names.
        settings: a flat config.json.
        embedding: [vocab_size, hidden_size].
        target: transformers' model.
    """

    def __init__(self, tensors, settings, embedding, target):
        self.tensors, self.settings, self.embedding = tensors, settings, embedding
        self.target = target

    @torch.inference_mode()
    def drafts(self, tokens, count):
        """Return the most likely `count` tokens after `tokens`, as the head guesses them."""
        ids = torch.tensor([tokens[:-1]])
        states = self.target(ids, output_hidden_states=True).hidden_states
        hidden = self.combine(torch.cat([states[i][0] for i in range(3)], -1).double())
        tokens, num_known = list(tokens), len(tokens)
        for _ in range(count):  # position i takes token i + 1
            logits, fed_back = self.forward(tokens[1:], hidden)
            draft = int(logits[-1].argmax())
            tokens.append(draft + int(self.tensors["d2t"][draft] if "d2t" in self.tensors else 0))
            hidden = torch.cat([hidden, fed_back[-1:]])
        return tokens[num_known:]

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


def make_reference(path, target):
    config = read_json(path / "config.json")
    settings = {**config, **config.get("transformer_layer_config", {})}
    tensors = {
        name.removeprefix("model.").replace("layers.0.", "midlayer."): tensor.double()
        for name, tensor in load_file(path / "model.safetensors").items()
    }
    embedding = tensors.get("embed_tokens.weight")
    if embedding is None:
        embedding = load_file(Path(target) / "model.safetensors")[
            "model.embed_tokens.weight"
        ].double()
    theirs = AutoModelForCausalLM.from_pretrained(target).eval()
    return Reference(tensors, settings, embedding, theirs)


@pytest.fixture(scope="module")
def target_path(random_model):
    return random_model


def drafted_by(make_llm, monkeypatch, target, path, **options):
    """Return the drafts of the head at `path`, by the tokens before them."""
    allow_all(monkeypatch)
    drafted = watch_drafts(monkeypatch)
    rng = random.Random(0)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, seed=1)
    requests = [(random_prompt(rng, length), params) for length in (2, 9, 45)]
    run(make_llm, target, requests, **speculating("eagle3", str(path), 4), **options)
    assert len(drafted) > 10
    return {tokens: drafts for (_, tokens), drafts in drafted.items()}


@pytest.mark.parametrize("case", CASES)
def test_what_the_reference_drafts(case, target_path, make_llm, tmp_path, monkeypatch):
    form = ("raw", "speculators")[[*CASES].index(case) % 2]
    prefix = "model." if form == "speculators" else ""
    make_eagle3_checkpoint(tmp_path, target_path, form=form, prefix=prefix, **CASES[case])
    reference = make_reference(tmp_path, target_path)
    options = {"kvcache_block_size": 4, "max_num_batched_tokens": 20}
    found = drafted_by(make_llm, monkeypatch, target_path, tmp_path, **options)
    for tokens, drafts in found.items():
        assert list(drafts) == reference.drafts(tokens, len(drafts))


@native
@pytest.mark.parametrize("case", ["norm before residual, biases", "norms of features"])
def test_head_with_the_c_kernels(case, shared_checkpoint, make_llm, tmp_path, monkeypatch):
    """In bfloat16 most drafts are the reference's."""
    target = shared_checkpoint(**{**NATIVE, "dtype": "float32"})
    make_eagle3_checkpoint(tmp_path, target, dtype=torch.bfloat16, **CASES[case])
    reference = make_reference(tmp_path, target)
    options = {"kvcache_block_size": 32, "dtype": "bfloat16"}
    found = drafted_by(make_llm, monkeypatch, target, tmp_path, **options)
    right = [drafts[0] == reference.drafts(tokens, 1)[0] for tokens, drafts in found.items()]
    assert sum(right) > 0.7 * len(right)


# Heads in the engine

REQUESTS = make_requests(12, sharing=False)
"""A row that shares a prefix with another may draft something else: see `DraftHead`."""


@pytest.fixture(scope="module")
def head(random_model: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_eagle3_checkpoint(tmp_path_factory.mktemp("head"), random_model)


def test_drafts_after_steps_without_any(
    random_model: str, head: str, make_llm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row drafts what it drafts alone, when it is asked in every step, and when it catches up."""
    drafted = watch_drafts(monkeypatch)
    alone = {"kvcache_block_size": 4, "enable_prefix_caching": False, "max_num_seqs": 1}
    chunks = {"kvcache_block_size": 4, "max_num_batched_tokens": 7}
    for seed, options in ((None, alone), (None, chunks), (0, PREEMPTING)):
        allow_all(monkeypatch, seed)
        num_before = len(drafted)
        run(make_llm, random_model, REQUESTS, **options, **speculating("eagle3", head))
    assert len(drafted) < 1.5 * num_before, "few contexts are new, so most drafts were compared"


@native
def test_recorded_steps_draft_the_same(
    shared_checkpoint: Any, make_llm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = shared_checkpoint(**NATIVE)
    head = make_eagle3_checkpoint(tmp_path, model)
    allow_all(monkeypatch)
    drafted = watch_drafts(monkeypatch)
    for enforce_eager in (True, False):
        eager = dict(drafted)
        options = {"kvcache_block_size": 32, "enforce_eager": enforce_eager}
        _, llm = run(make_llm, model, REQUESTS, **options, **speculating("eagle3", head))
        recorded = llm.engine.executor._runner.drafter._recorded
        assert [one is None for one in recorded] == [enforce_eager] * 2
    assert drafted == eager
    assert len(drafted) > 60


def make_copying_head(path: Path, model: str) -> str:
    """Return a head that always drafts token 5: its output is a constant of its last norm."""
    head = make_eagle3_checkpoint(path, model, draft_vocab_size=1003)
    tensors = load_file(path / "model.safetensors")
    lm_head = torch.zeros_like(tensors["lm_head.weight"])
    zeros = torch.zeros_like(tensors["norm.weight"])
    change_tensors(path, lm_head__weight=lm_head, norm__weight=zeros)
    return head


def test_the_most_likely_token_by_the_request_s_rules(
    random_model: str, make_llm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All logits of this head are 0, so a bias says what it drafts, and all is accepted."""
    allow_all(monkeypatch)
    head = make_copying_head(tmp_path, random_model)
    params = SamplingParams(
        temperature=1.0, seed=1, max_tokens=20, ignore_eos=True, logit_bias={900: 100.0}
    )
    prompt = random_prompt(random.Random(1), 9)
    found, llm = run(make_llm, random_model, [(prompt, params)], **speculating("eagle3", head))
    assert found[0].token_ids == [900] * 20
    num_accepted, num_proposed = acceptance(llm)
    assert num_accepted == num_proposed > 10


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
def test_a_tensor_that_does_not_match_is_named(changes, message, target_path, make_llm, tmp_path):
    make_eagle3_checkpoint(tmp_path, target_path)
    change_tensors(tmp_path, **changes)
    with pytest.raises(CheckpointError, match=message):
        make_llm(target_path, **speculating("eagle3", str(tmp_path)))


@pytest.mark.parametrize("difference", [-1, 2**62])
def test_draft_ids_that_are_no_tokens(difference, target_path, make_llm, tmp_path):
    make_eagle3_checkpoint(tmp_path, target_path)
    d2t = torch.zeros(334, dtype=torch.int64)
    d2t[0] = difference
    change_tensors(tmp_path, d2t=d2t)
    message = f"d2t: draft id 0 stands for token {difference}"
    with pytest.raises(CheckpointError, match=message):
        make_llm(target_path, **speculating("eagle3", str(tmp_path)))


def test_a_trained_embedding_must_be_there(target_path, make_llm, tmp_path):
    """And the residual of speculators is normalised unless it says otherwise."""
    make_eagle3_checkpoint(tmp_path, target_path, form="speculators")
    config = read_json(tmp_path / "config.json")
    assert not read(config, target_path).norm_before_residual
    del config["norm_before_residual"]
    assert read(config, target_path).norm_before_residual
    write_json(tmp_path / "config.json", {**config, "embed_requires_grad": True})
    with pytest.raises(CheckpointError, match="missing embed_tokens.weight"):
        make_llm(target_path, **speculating("eagle3", str(tmp_path)))


def test_a_head_is_no_model_of_its_own(target_path, tmp_path, make_llm):
    make_eagle3_checkpoint(tmp_path, target_path, own_embedding=True)
    with pytest.raises(UnsupportedModelError, match="is a draft head: name its target"):
        make_llm(tmp_path, device="cpu")
    config = ModelConfig.from_hf(read_json(tmp_path / "config.json"))
    with pytest.raises(UnsupportedModelError, match="draft head"):
        model_class(config)


def test_dummy_weights(target_path, make_llm, tmp_path):
    make_eagle3_checkpoint(tmp_path, target_path)
    llm = make_llm(target_path, load_format="dummy", **speculating("eagle3", str(tmp_path)))
    (output,) = generate_all(llm, [([1, 2, 3], SamplingParams(max_tokens=8, ignore_eos=True))])
    assert len(output.token_ids) == 8
