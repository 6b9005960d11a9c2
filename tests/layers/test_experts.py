"""The blocks of experts against those of transformers, loaded from what transformers saves."""

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import AutoConfig
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.ernie4_5_moe.modeling_ernie4_5_moe import Ernie4_5_MoeTopKRouter
from transformers.models.gemma4.modeling_gemma4 import Gemma4TextExperts, Gemma4TextRouter
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeTopkRouter
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP
from transformers.models.laguna.modeling_laguna import LagunaTopKRouter
from transformers.models.mistral4.modeling_mistral4 import Mistral4TopkRouter
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from nanovllm.kernels import torch_experts
from nanovllm.kernels.torch_experts import ExpertChoice, Groups
from nanovllm.layers import linear as linear_module
from nanovllm.layers.experts import Experts, NormedRouter, Router, SparseMLP, StoredExperts
from nanovllm.loading.loader import load_weights
from nanovllm.utils import distributed
from tests.closeness import assert_close

SIZES = {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 32}
GPT_OSS = StoredExperts(linears=None, transposed=True, interleaved=True)
TOGETHER = StoredExperts(linears=None)


def randomize(module: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(7)
    for parameter in module.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.4
    return module.requires_grad_(False)


def load(module: nn.Module, tensors: dict[str, torch.Tensor], path) -> nn.Module:
    file = path / "model.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file)
    load_weights(module, [file], progress=False)
    return module.requires_grad_(False)


def per_expert(state: dict[str, torch.Tensor], names: tuple[str, str, str], size: int):
    """Return the tensors of a block as the files of transformers have them."""
    tensors = {"gate.weight": state["gate.weight"]}
    pairs = zip(state["experts.gate_up_proj"], state["experts.down_proj"], strict=True)
    for expert, (gate_up, down) in enumerate(pairs):
        parts = (gate_up[:size], gate_up[size:], down)
        for name, part in zip(names, parts, strict=True):
            tensors[f"experts.{expert}.{name}.weight"] = part
    return tensors


def tokens(hidden_size: int = 24) -> torch.Tensor:
    return torch.randn(50, hidden_size, generator=torch.Generator().manual_seed(1))


@pytest.fixture(params=[1, 2], ids=["whole", "two ranks"])
def summed(request, monkeypatch):
    """Return a function that makes and runs a module on each rank, and adds the results."""
    size = request.param

    def run(make, x):
        total = torch.zeros(())
        for rank in range(size):
            here = distributed.TensorParallel(rank, size)
            for module in (linear_module, distributed):
                monkeypatch.setattr(module, "tensor_parallel", lambda here=here: here)
            monkeypatch.setattr("nanovllm.layers.experts.tensor_parallel", lambda here=here: here)
            total = total + make()(x)
        return total

    return run


QWEN3 = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 14}
MIXTRAL = {"num_local_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 14}
NAMED = StoredExperts(linears=("w1", "w3", "w2"))
OAI = {"activation": "swiglu_oai", "bias": True, "stored": GPT_OSS}
QWEN3_MOE = "qwen3_moe", Qwen3MoeSparseMoeBlock
BLOCKS = [
    (*QWEN3_MOE, {**QWEN3, "norm_topk_prob": False}, {"renormalize": False}, {}),
    (*QWEN3_MOE, {**QWEN3, "norm_topk_prob": True}, {"renormalize": True}, {}),
    ("mixtral", MixtralSparseMoeBlock, MIXTRAL, {"renormalize": True}, {"stored": NAMED}),
    ("gpt_oss", GptOssMLP, MIXTRAL, {"renormalize": True, "bias": True}, OAI),
]
"""Name and block of transformers, its fields, and the options of `Router` and of `Experts`."""


@pytest.mark.parametrize(("name", "block", "fields", "choice", "options"), BLOCKS)
def test_blocks_of_transformers(name, block, fields, choice, options, summed, tmp_path):
    theirs = randomize(block(AutoConfig.for_model(name, **fields, **SIZES)))
    tensors = {key.replace("router.", "gate."): x for key, x in theirs.state_dict().items()}
    names = options.get("stored", StoredExperts()).linears
    if names is not None:
        tensors = per_expert(tensors, names, 14)

    def make():
        router = Router(24, 6, 3, **choice)
        return load(SparseMLP(router, Experts(6, 24, 14, **options)), tensors, tmp_path)

    x = tokens() * 4  # so that gates and ups reach their limits
    expected = theirs(x[None])
    expected = (expected[0] if isinstance(expected, tuple) else expected)[0]
    assert_close(summed(make, x), expected, rtol=1e-5, atol=1e-4)


def test_gemma4(summed, tmp_path):
    config = AutoConfig.for_model(
        "gemma4_text",
        enable_moe_block=True,
        num_experts=6,
        top_k_experts=3,
        moe_intermediate_size=14,
        **SIZES,
    )
    router, experts = randomize(Gemma4TextRouter(config)), randomize(Gemma4TextExperts(config))
    x, residual = tokens(), tokens().flip(0)

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router = NormedRouter(24, 6, 3, config.rms_norm_eps)
            self.experts = Experts(6, 24, 14, activation="gelu_tanh", stored=TOGETHER)

        def forward(self, x):
            return self.experts(x, self.router(residual))

    tensors = {f"router.{name}": tensor for name, tensor in router.state_dict().items()}
    tensors |= {f"experts.{name}": tensor for name, tensor in experts.state_dict().items()}
    _, weights, ids = router(residual)
    expected = experts(x, ids, weights)
    made = summed(lambda: load(Block(), tensors, tmp_path), x)
    assert_close(made, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("together", [False, True])
def test_experts_without_a_gate(together, summed, tmp_path):
    config = AutoConfig.for_model(
        "nemotron_h", n_routed_experts=6, moe_intermediate_size=14, mlp_hidden_act="relu2", **SIZES
    )
    theirs = randomize(NemotronHExperts(config))
    tensors = {f"experts.{name}": tensor for name, tensor in theirs.state_dict().items()}
    if not together:
        tensors = {
            f"experts.{expert}.{name}.weight": weight
            for name, weights in theirs.state_dict().items()
            for expert, weight in enumerate(weights)
        }
    router = Router(24, 6, 3, renormalize=True, sigmoid=True)
    routing = randomize(router)(tokens())

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            stored = TOGETHER if together else StoredExperts()
            self.experts = Experts(6, 24, 14, gated=False, activation="relu2", stored=stored)

        def forward(self, x):
            return self.experts(x, routing)

    expected = theirs(tokens(), routing.ids.long(), routing.weights)
    made = summed(lambda: load(Block(), tensors, tmp_path), tokens())
    assert_close(made, expected, rtol=1e-5, atol=1e-5)


DEEPSEEK_V3 = ExpertChoice(3, renormalize=True, factor=1.8, sigmoid=True, epsilon=1e-20)
BY_NAME = {
    "deepseek_v3": (DeepseekV3TopkRouter, DEEPSEEK_V3._replace(groups=Groups(4, 2, 2))),
    "glm4_moe": (Glm4MoeTopkRouter, DEEPSEEK_V3),
    "deepseek_v2": (DeepseekV2TopkRouter, ExpertChoice(3, False, 1.8, groups=Groups(4, 2, 1))),
    "mistral4": (
        Mistral4TopkRouter,
        ExpertChoice(3, True, 1.8, epsilon=1e-20, groups=Groups(4, 2, 2)),
    ),
    "ernie4_5_moe": (Ernie4_5_MoeTopKRouter, ExpertChoice(3, True, epsilon=1e-12)),
    "laguna": (LagunaTopKRouter, ExpertChoice(3, True, sigmoid=True)),
}


@pytest.mark.parametrize("name", BY_NAME)
def test_choices_of_transformers(name):
    router_class, choice = BY_NAME[name]
    groups = choice.groups or Groups(1, 1, 1)
    fields = {
        "num_experts_per_tok": 3,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.8,
        "num_experts": 12,
        "n_routed_experts": 12,
        "topk_method": "group_limited_greedy",
        "n_group": groups.number,
        "topk_group": groups.kept,
    }
    theirs = randomize(router_class(AutoConfig.for_model(name, **SIZES, **fields)))
    bias = None
    for key, tensor in theirs.state_dict().items():
        if "bias" in key:
            tensor.copy_(torch.linspace(-0.2, 0.2, 12)[torch.arange(12) * 5 % 12])
            bias = tensor.flatten()
    _, weights, ids = theirs(tokens())
    found = torch_experts.route(tokens() @ theirs.weight.T, choice._replace(bias=bias))
    order = found.weights.argsort(-1), weights.argsort(-1)
    assert torch.equal(found.ids.gather(1, order[0]), ids.gather(1, order[1]).int())
    assert_close(found.weights.gather(1, order[0]), weights.gather(1, order[1]), rtol=1e-5)


def test_of_equal_logits_the_first_expert_is_chosen():
    logits = torch.tensor([[1.0, 2.0, 1.0, 2.0, 0.0], [0.0, 0.0, 0.0, 0.0, 0.0]])
    routing = torch_experts.route(logits, ExpertChoice(3, renormalize=True))
    assert routing.ids.tolist() == [[1, 3, 0], [0, 1, 2]]
    torch.testing.assert_close(routing.weights.sum(1), torch.ones(2))
