"""Mamba-2 against transformers' modules, of Bamba, of Falcon-H1 and of Nemotron-H."""

import contextlib

import pytest
import torch
from transformers import AutoConfig
from transformers.models.bamba.modeling_bamba import BambaMixer
from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1Mixer
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHMamba2Mixer

from nanovllm.errors import ConfigError
from nanovllm.layers.mamba2 import GatedNorm, Mamba2, MambaSizes
from tests.closeness import assert_close
from tests.layers import mixer_cases

NO_LIMITS = 0.0, torch.inf
LIMITS = 0.3, 1.5


def bamba(limits):
    sizes = MambaSizes(20, heads=4, head_dim=10, groups=2, state_size=6, taps=4)
    config = AutoConfig.for_model(
        "bamba",
        hidden_size=20,
        mamba_n_heads=4,
        mamba_n_groups=2,
        mamba_d_state=6,
        mamba_proj_bias=True,
        time_step_limit=limits,
        num_hidden_layers=1,
        rms_norm_eps=1e-3,
    )
    return Mamba2(sizes, limits, 1e-3, bias=True, output_bias=True), BambaMixer(config, 0)


def nemotron(limits):
    sizes = MambaSizes(24, heads=8, head_dim=6, groups=4, state_size=16, taps=3)
    config = AutoConfig.for_model(
        "nemotron_h",
        hidden_size=24,
        mamba_num_heads=8,
        mamba_head_dim=6,
        n_groups=4,
        ssm_state_size=16,
        conv_kernel=3,
        use_conv_bias=False,
        time_step_min=limits[0],  # which transformers takes in place of time_step_limit
        layer_norm_epsilon=1e-3,
    )
    return Mamba2(sizes, limits, 1e-3, conv_bias=False), NemotronHMamba2Mixer(config, 0)


def falcon(limits, **norm):
    sizes = MambaSizes(20, heads=6, head_dim=5, groups=2, state_size=7, taps=2)
    config = AutoConfig.for_model(
        "falcon_h1",
        hidden_size=20,
        mamba_d_ssm=30,
        mamba_n_heads=6,
        mamba_d_head=5,
        mamba_n_groups=2,
        mamba_d_state=7,
        mamba_d_conv=2,
        mamba_rms_norm=bool(norm),
        mamba_norm_before_gate=not norm.get("gate_first"),
        rms_norm_eps=1e-3,
    )
    theirs = FalconH1Mixer(config, 0)
    theirs.mup_vector = torch.ones(())
    theirs.time_step_limit = limits
    return Mamba2(sizes, limits, 1e-3 if norm else None, **norm), theirs


CASES = {
    "bamba": lambda: bamba(NO_LIMITS),
    "bamba with limits": lambda: bamba(LIMITS),
    "nemotron": lambda: nemotron((0.3, torch.inf)),
    "falcon without norm": lambda: falcon(NO_LIMITS),
    "falcon, norm first": lambda: falcon(LIMITS, gate_first=False),
    "falcon, gate first": lambda: falcon(NO_LIMITS, gate_first=True),
}


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("case", CASES)
def test_as_transformers(case, num_ranks, tmp_path, monkeypatch):
    _, theirs = CASES[case]()
    theirs = mixer_cases.randomize(theirs)
    ranks = mixer_cases.on_ranks(monkeypatch, num_ranks, "nanovllm.layers.mamba2")
    size = theirs.in_proj.in_features
    mixer_cases.assert_as_transformers(lambda: CASES[case]()[0], theirs, size, ranks, tmp_path)


@pytest.mark.parametrize(
    ("num_ranks", "groups", "match"), [(3, 2, "Mamba-2 heads"), (4, 6, "Mamba-2 groups")]
)
def test_sizes_that_the_ranks_cannot_split(num_ranks, groups, match, monkeypatch):
    sizes = MambaSizes(24, heads=groups * 2, head_dim=4, groups=groups, state_size=8, taps=4)
    for _ in mixer_cases.on_ranks(monkeypatch, num_ranks, "nanovllm.layers.mamba2"):
        with pytest.raises(ConfigError, match=match):
            Mamba2(sizes, NO_LIMITS, 1e-5)


@pytest.mark.parametrize("gate_first", [True, False])
@pytest.mark.parametrize(("groups", "num_ranks"), [(1, 2), (2, 4)])
def test_norm_of_groups_that_are_on_several_ranks(groups, num_ranks, gate_first, monkeypatch):
    whole = GatedNorm(24, groups, 1e-3, gate_first=gate_first)
    whole.weight.data = torch.randn(24, generator=torch.Generator().manual_seed(0))
    x, gate = torch.randn(2, 5, 24, generator=torch.Generator().manual_seed(1))
    expected = whole(x, gate)
    squares, found = [], []
    for sums in (squares.append, lambda _: sum(squares)):  # the ranks run one after the other
        monkeypatch.setattr("nanovllm.layers.mamba2.all_reduce", lambda own, sums=sums: sums(own))
        ranks = mixer_cases.on_ranks(monkeypatch, num_ranks, "nanovllm.layers.mamba2")
        for rank, _ in enumerate(ranks):
            norm = GatedNorm(24, groups, 1e-3, gate_first=gate_first)
            inputs = [each.chunk(num_ranks, -1)[rank] for each in (whole.weight, x, gate)]
            norm.weight.data = inputs[0].data
            with contextlib.suppress(TypeError):  # in the first round the sums are not known
                found.append(norm(*inputs[1:]))
    assert_close(torch.cat(found, dim=1), expected, of_largest=1e-6)
