"""Each family beside transformers' own class: logits, greedy tokens, batching, windows, hits."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoints import write_json
from tests.models.comparison import (  # noqa: F401
    assert_logits_agree,
    check_answers,
    runs,
    saved_models,
    test_logits_of_all_positions,
)
from tests.models.family_cases import CASES, make_model

saved = saved_models(make_model, CASES)


@pytest.mark.thinned(4)
@pytest.mark.parametrize(("saved", "chunk"), runs(CASES), indirect=["saved"])
def test_greedy_tokens(saved, chunk, make_llm):
    check_answers(saved, chunk, make_llm)


MASKS = {
    "bias": torch.ones(1, 1, 64, 64, dtype=torch.bool).tril(),
    "masked_bias": torch.tensor(-1e9),
}
ON_THE_HUB = {
    "gpt2 0": (
        {"transformer.": ""},
        {f"h.0.attn.{name}": mask for name, mask in MASKS.items()},
    ),
    "gpt_neox 4": (
        {"lm_head.": "embed_out."},  # transformers writes it thus, too
        {
            **{f"gpt_neox.layers.0.attention.{name}": mask for name, mask in MASKS.items()},
            "gpt_neox.layers.0.attention.rotary_emb.inv_freq": torch.ones(2),
        },
    ),
}
"""How the first files of a family differ: beginnings of names, and tensors that nothing needs."""


@pytest.mark.parametrize("case", ON_THE_HUB)
def test_files_as_they_were_first_published(case, tmp_path):
    theirs = make_model(case)
    theirs.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    names, more = ON_THE_HUB[case]
    tensors = load_file(file)
    for own, published in names.items():
        tensors = {
            name.replace(own, published) if name.startswith(own) else name: tensor
            for name, tensor in tensors.items()
        }
    assert any(name.startswith(published) for name in tensors)
    save_file(tensors | more, file)
    assert_logits_agree(theirs, tmp_path, case)


@pytest.mark.parametrize(
    ("case", "drafting"),
    [
        ("glm4_moe 0", "model.layers.4.eh_proj.weight"),
        ("ernie4_5_moe 0", "model.mtp_linear_proj.0.weight"),
        ("minimax_m2 0", None),
    ],
)
def test_published_files(case, drafting, tmp_path, caplog):
    """They have layers for drafts, which are left out, and older names of settings."""
    theirs = make_model(case)
    theirs.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    if drafting is not None:
        config["num_nextn_predict_layers"] = 1
        tensors = load_file(tmp_path / "model.safetensors") | {drafting: torch.ones(3, 6)}
        save_file(tensors, tmp_path / "model.safetensors")
    else:
        rope = config.pop("rope_parameters")
        config["rotary_dim"] = int(config["head_dim"] * rope["partial_rotary_factor"])
        config["rope_theta"] = rope["rope_theta"]
    write_json(tmp_path / "config.json", config)
    with caplog.at_level("INFO", logger="nanovllm.loading.loader"):
        assert_logits_agree(theirs, tmp_path, case)
    assert ("(1 tensors)" in caplog.text) == (drafting is not None)
