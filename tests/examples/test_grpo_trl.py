"""TRL's GRPOTrainer with nanovllm in its process, end to end on the shipped model."""

import importlib.util
from pathlib import Path

import pytest

if importlib.util.find_spec("trl") is None:
    pytest.skip("TRL is not installed", allow_module_level=True)

import torch
from peft import LoraConfig, get_peft_model

from examples.grpo_trl import EngineGeneration, make_trainer


@pytest.mark.long
def test_reward_rises(tmp_path: Path) -> None:
    """In 20 steps, with sleep(level=2) between them and the correction by importance sampling."""
    trainer = make_trainer(20, str(tmp_path), kv_cache_memory_bytes=2**25)
    generation = trainer.vllm_generation
    assert generation.llm.is_sleeping()
    trainer.train()
    steps = [entry for entry in trainer.state.log_history if "reward" in entry]
    assert len(steps) == 20
    rewards = [entry["reward"] for entry in steps]
    first, last = sum(rewards[:4]) / 4, sum(rewards[-4:]) / 4
    assert last > first + 0.05, rewards
    # The engine samples from the trainer's own distribution, up to float32's order of sums.
    differences = [entry["sampling/sampling_logp_difference/max"] for entry in steps]
    assert max(differences) < 1e-3
    assert generation.llm.weight_version == 20
    assert generation.llm.is_sleeping()
    generation.sync_weights()
    generation.llm.wake_up()
    tokens = [1, 2, 3, 4]
    with torch.no_grad():
        logits = trainer.model.eval()(torch.tensor([tokens])).logits[0, -1]
    output = generation.generate([tokens], None, 1)
    assert output[0] == [tokens]
    assert output[3][0][0][0] == output[1][0][0]
    expected = logits.log_softmax(-1)[output[1][0][0]].item()
    assert output[2][0][0][0] == pytest.approx(expected, abs=1e-3)
    # PEFT's adapters are merged while TRL gives the weights, and taken out after the last one.
    lora = LoraConfig(target_modules="all-linear", init_lora_weights=False)
    model = generation.model = get_peft_model(trainer.model, lora).eval()
    with torch.no_grad():
        adapted = model(torch.tensor([tokens])).logits[0, -1]
    output = generation.generate([tokens], None, 1)
    expected = adapted.log_softmax(-1)[output[1][0][0]].item()
    assert output[2][0][0][0] == pytest.approx(expected, abs=1e-3)
    assert (adapted - logits).abs().max() > 0.1
    generation.llm.shutdown()


def test_what_is_refused() -> None:
    """A server, and several ranks, before anything is loaded."""
    for options in ({"mode": "server"}, {"mode": "colocate", "tensor_parallel_size": 2}):
        with pytest.raises(ValueError, match=r'use "colocate" and 1'):
            EngineGeneration(model=torch.nn.Linear(1, 1), **options)
