"""The short convolution against transformers' module of LFM2."""

import pytest
from transformers import AutoConfig
from transformers.models.lfm2.modeling_lfm2 import Lfm2ShortConv

from nanovllm.layers.state_layer import ShortConv
from tests.layers import mixer_cases


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize(("taps", "bias"), [(3, False), (4, True), (2, True)])
def test_as_transformers(taps, bias, num_ranks, tmp_path, monkeypatch):
    sizes = {"hidden_size": 26, "conv_L_cache": taps, "conv_bias": bias}
    config = AutoConfig.for_model("lfm2", num_hidden_layers=1, layer_types=["conv"], **sizes)
    theirs = mixer_cases.randomize(Lfm2ShortConv(config, 0))
    ranks = mixer_cases.on_ranks(monkeypatch, num_ranks)
    mixer_cases.assert_as_transformers(
        lambda: ShortConv(26, taps, bias=bias), theirs, 26, ranks, tmp_path
    )
