"""Logits and greedy tokens of random small models of each family against transformers."""

import json
import random

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from nanovllm import SamplingParams
from nanovllm.checkpoint.hub import open_checkpoint, weight_files
from nanovllm.kernels.torch_kernels import TORCH
from nanovllm.models.registry import read_config
from nanovllm.options.config import Config
from nanovllm.scheduler.messages import Admission, NewBlocks, Row, Schedule
from nanovllm.scheduler.windows import num_tables
from nanovllm.scheduler.worker_info import WorkerInfo
from nanovllm.worker.device_tables import DeviceTables
from nanovllm.worker.model_loader import NetworkSpec
from nanovllm.worker.network import Network
from tests.checkpoints import random_model

MAX_LENGTH = 128
NUM_PAGES = 1000
GREEDY = SamplingParams(temperature=0)
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR = {"rope_type": "linear", "factor": 3.0}
QWEN3 = {
    "untied head": {"tie_word_embeddings": False},
    "tied head": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True},
    "biases and tied head": {"attention_bias": True, "tie_word_embeddings": True},
    "head_dim above hidden/heads": {"hidden_size": 48, "group": 2, "kv_heads": 2, "head_dim": 64},
    "head_dim below hidden/heads": {"hidden_size": 96, "group": 2, "kv_heads": 2, "head_dim": 6},
    "group of 1": {"group": 1, "kv_heads": 3},
    "group of 2": {"group": 2},
    "group of 4": {"group": 4},
    "group of 8": {"group": 8, "kv_heads": 1},
    "yarn": {"rope": YARN},
    "yarn factor 2.5": {"rope": {**YARN, "factor": 2.5}},
    "yarn factor 40": {"rope": {**YARN, "factor": 40.0}},
    "yarn attention_factor": {"rope": {**YARN, "attention_factor": 1.6}},
    "yarn beta_fast": {"rope": {**YARN, "beta_fast": 4}, "head_dim": 64},
    "yarn beta_slow": {"rope": {**YARN, "beta_slow": 3, "factor": 8.0}, "attention_bias": True},
    "yarn mscale": {"rope": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5}},
    "yarn not truncated": {"rope": {**YARN, "truncate": False}},
    "linear scaling": {"rope": LINEAR},
    "linear scaling, large theta": {"rope": {**LINEAR, "factor": 8.0, "rope_theta": 1e7}},
    "odd vocabulary": {"vocab_size": 1003},
    "odd intermediate size": {"intermediate_size": 77},
    "four layers": {"num_hidden_layers": 4},
    "large theta": {"rope": {"rope_type": "default", "rope_theta": 5e7}, "num_hidden_layers": 1},
}
LLAMA = {
    "llama 2": {"kv_heads": 3, "group": 1},
    "tied head": {"tie_word_embeddings": True},
    "untied head": {"tie_word_embeddings": False},
    "attention biases": {"attention_bias": True},
    "mlp biases": {"mlp_bias": True},
    "all biases and tied head": {
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
    },
    "head_dim above hidden/heads": {"head_dim": 64},
    "head_dim below hidden/heads": {"group": 4, "kv_heads": 2, "head_dim": 6},
    "head_dim from hidden/heads": {"hidden_size": 96, "group": 3, "kv_heads": 2, "head_dim": None},
    "three heads for one KV head": {"group": 3, "kv_heads": 3, "head_dim": 64},
    "llama3": {"rope": LLAMA3},
    "llama3 factor 32": {"rope": {**LLAMA3, "factor": 32.0, "rope_theta": 5e5}, "head_dim": 64},
    "llama3 low and high factors": {
        "rope": {**LLAMA3, "low_freq_factor": 0.5, "high_freq_factor": 9.0},
        "attention_bias": True,
    },
    "linear scaling": {"rope": LINEAR},
    "yarn": {"rope": YARN},
    "SmolLM2": {
        "group": 3,
        "kv_heads": 3,
        "tie_word_embeddings": True,
        "rope": {"rope_type": "default", "rope_theta": 1e5},
    },
}
QWEN2 = {
    "tied head": {"tie_word_embeddings": True},
    "untied head": {"tie_word_embeddings": False},
    "group of 1": {"group": 1, "kv_heads": 3},
    "group of 2": {"group": 2},
    "group of 4": {"group": 4},
    "group of 7": {"group": 7, "kv_heads": 2},
    "head_dim above hidden/heads": {"head_dim": 64},
    "head_dim below hidden/heads": {"group": 4, "kv_heads": 2, "head_dim": 6},
    "head_dim from hidden/heads": {"hidden_size": 96, "group": 3, "kv_heads": 2, "head_dim": None},
    "large theta": {"rope": {"rope_type": "default", "rope_theta": 1e6}},
    "yarn": {"rope": YARN},
    "yarn attention_factor": {"rope": {**YARN, "attention_factor": 1.6}},
    "linear scaling": {"rope": LINEAR},
    "odd sizes": {"vocab_size": 1003, "intermediate_size": 77},
    "four layers": {"num_hidden_layers": 4},
    "windows that are off": {"use_sliding_window": False, "sliding_window": 8},
}
CASES = {
    f"{model_type} {name}": (model_type, settings)
    for model_type, cases in {"qwen3": QWEN3, "llama": LLAMA, "qwen2": QWEN2}.items()
    for name, settings in cases.items()
}


def make_config(case):
    """Return the configuration of a case. Sizes that the case does not set are random."""
    model_type, changes = CASES[case]
    chooser = random.Random(case)
    settings = {
        "group": chooser.choice([1, 2, 4]),
        "kv_heads": chooser.choice([1, 2, 3]),
        "head_dim": chooser.choice([16, 18, 32, 40]),
        "hidden_size": chooser.choice([32, 56, 90]),
        "intermediate_size": chooser.choice([48, 77, 130]),
        "num_hidden_layers": chooser.choice([1, 2, 3]),
        "vocab_size": chooser.choice([500, 512, 1003]),
        "attention_bias": chooser.random() < 0.3,
        "tie_word_embeddings": chooser.random() < 0.5,
        "rope": {"rope_type": "default"},
        **changes,
    }
    rope = {"rope_theta": 10_000.0, **settings.pop("rope")}
    kv_heads = settings.pop("kv_heads")
    num_heads = settings.pop("group") * kv_heads
    if settings["head_dim"] is None:
        del settings["head_dim"]
    if model_type == "llama":  # transformers demands it, whatever head_dim is
        settings["hidden_size"] = -(-settings["hidden_size"] // num_heads) * num_heads
    return AutoConfig.for_model(
        model_type,
        num_attention_heads=num_heads,
        num_key_value_heads=kv_heads,
        rope_parameters=rope,
        rms_norm_eps=chooser.choice([1e-6, 1e-3]),
        max_position_embeddings=4096,
        **settings,
    )


def make_model(case):
    """Return a model of transformers. All weights are random, norms and biases included."""
    return random_model(make_config(case), seed=len(case))


class Steps:
    """Our model from a directory, with a KV cache and device tables, to run hand-made schedules."""

    def __init__(self, path, block_size):
        checkpoint = open_checkpoint(str(path))
        config = Config(str(path), device="cpu", kvcache_block_size=block_size, dtype="float32")
        model_config = read_config(checkpoint.config, config.dtype)
        spec = NetworkSpec(config, model_config, weight_files(checkpoint, str(path)))
        cpu = torch.device("cpu")
        self.network = Network(spec, MAX_LENGTH, cpu)
        self.network.make_pool(NUM_PAGES)
        self.windows = self.network.attention.layout.windows
        self.state_pages = self.network.attention.states.num_pages
        sizes = (NUM_PAGES, block_size, MAX_LENGTH, model_config.vocab_size, 512)
        info = WorkerInfo(*sizes, windows=self.windows, state_pages=self.state_pages)
        self.tables = DeviceTables(info, 8, cpu, TORCH)

    @torch.inference_mode()
    def logits(self, schedule):
        """Return the logits of every token of the schedule's rows; check `output_indices` too."""
        self.tables.apply(schedule)
        pool = self.network.pool
        pool.zero(schedule.blocks_to_zero)
        before = pool.pages.clone() if self.state_pages else None
        hidden = self.network.forward(self.tables, schedule.rows, None)
        output_indices = torch.arange(len(hidden)).flip(0)[::3]
        if before is not None:  # a step changes states
            after = pool.pages.clone()
            pool.pages.copy_(before)
        some = self.network.forward(self.tables, schedule.rows, output_indices)
        torch.testing.assert_close(some, hidden[output_indices], rtol=1e-4, atol=1e-4)
        if before is not None:
            assert torch.equal(pool.pages, after)
        return self.network.model.compute_logits(hidden)


def run_in_chunks(path, prompts, cuts, block_size):
    """Run the prompts in two mixed steps, before and after each one's cut; return all logits."""
    steps = Steps(path, block_size)
    chooser = random.Random(block_size)
    blocks = chooser.sample(range(NUM_PAGES), NUM_PAGES)
    width = -(-MAX_LENGTH // block_size)
    table_indices = chooser.sample(range(8), len(prompts))
    admissions, first_blocks, new_blocks, first, second, fresh = [], [], [], [], [], []
    rows = zip(prompts, cuts, table_indices, strict=True)
    for index, (prompt, cut, table_idx) in enumerate(rows):
        before, whole = -(-cut // block_size), -(-len(prompt) // block_size)
        ids = [blocks.pop() for _ in range(whole)]
        for table in range(1, num_tables(steps.windows)):
            pages = [blocks.pop() for _ in range(whole)]
            first_blocks.append(NewBlocks(table_idx, table * width, pages))
        if steps.state_pages:
            pages = [blocks.pop() for _ in range(steps.state_pages)]
            first_blocks.append(NewBlocks(table_idx, num_tables(steps.windows) * width, pages))
            fresh += pages
        start = (index, table_idx, prompt, len(prompt), ids[:before])
        admissions.append(Admission(*start, GREEDY, 0, frozenset(), ()))
        first.append(Row(index, table_idx, 0, cut, samples=cut == len(prompt)))
        if cut < len(prompt):
            second.append(Row(index, table_idx, cut, len(prompt) - cut, samples=True))
            new_blocks.append(NewBlocks(table_idx, before, ids[before:]))
    second.reverse()
    logits = [[] for _ in prompts]
    for schedule in (
        Schedule(0, admissions, first_blocks, first, fresh),
        Schedule(1, [], new_blocks, second),
    ):
        lengths = [row.num_scheduled_tokens for row in schedule.rows]
        parts = steps.logits(schedule).split(lengths)
        for row, part in zip(schedule.rows, parts, strict=True):
            logits[row.seq_id].append(part)
    return [torch.cat(parts) for parts in logits]


def random_prompts(case, vocab_size, lengths):
    chooser = random.Random(case)
    return [[chooser.randrange(vocab_size) for _ in range(length)] for length in lengths]


def vocab_size_of(theirs):
    """Return the vocabulary size of transformers' model, which may be a model for pictures, too."""
    return theirs.config.get_text_config().vocab_size


def assert_logits_agree(theirs, path, case):
    """Compare the logits of all positions. Prompts are whole, or cut inside or between blocks."""
    chooser = random.Random(case)
    block_size = chooser.choice([4, 7, 16])
    lengths = [1, 23, 64, 2 * block_size, 120, 50]
    cuts = [1, 23, chooser.randint(1, 63), block_size, 119, chooser.randint(1, 49)]
    prompts = random_prompts(case, vocab_size_of(theirs), lengths)
    with torch.inference_mode():
        for prompt, logits in zip(
            prompts, run_in_chunks(path, prompts, cuts, block_size), strict=True
        ):
            expected = theirs(torch.tensor([prompt])).logits[0]
            assert logits.shape == expected.shape
            assert (logits - expected).abs().max() < 1e-4 * expected.abs().max()


def assert_tokens_are_greedy(theirs, prompts, outputs):
    """Each output has 64 tokens, and each is the likeliest one after the tokens before it."""
    with torch.inference_mode():
        for prompt, output in zip(prompts, outputs, strict=True):
            logits = theirs(torch.tensor([prompt + output.token_ids])).logits[0]
            assert output.token_ids == logits[len(prompt) - 1 : -1].argmax(-1).tolist()
            assert len(output.token_ids) == 64


@pytest.fixture(scope="module", params=CASES)
def saved(request, tmp_path_factory):
    """The name of each case, the model of transformers and the directory where it is saved."""
    model, path = make_model(request.param), tmp_path_factory.mktemp("model")
    model.save_pretrained(path)
    return request.param, model, path


def test_logits_of_all_positions(saved):
    case, theirs, path = saved
    assert_logits_agree(theirs, path, case)


def test_64_greedy_tokens(saved, make_llm):
    """Three prompts at once. The longest is prefilled in chunks while the others decode."""
    case, theirs, path = saved
    prompts = random_prompts(case, vocab_size_of(theirs), [3, 17, 60])
    llm = make_llm(
        path,
        device="cpu",
        max_model_len=MAX_LENGTH,
        max_num_batched_tokens=24,
        kvcache_block_size=16,
        num_kvcache_blocks=32,
    )
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert_tokens_are_greedy(theirs, prompts, outputs)


@pytest.mark.parametrize(
    "case", ["qwen3 yarn mscale", "qwen3 linear scaling", "llama llama3", "qwen2 large theta"]
)
def test_config_in_the_style_of_transformers_4(case, tmp_path):
    model = make_model(case)
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    rope["type"] = rope.pop("rope_type")
    config["rope_scaling"] = None if rope["type"] == "default" else rope
    config["torch_dtype"] = config.pop("dtype")
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert_logits_agree(model, tmp_path, case)


@pytest.mark.parametrize(
    ("case", "change"),
    [
        ("qwen3 yarn mscale", {"factor": 2.0}),
        ("qwen3 yarn mscale", {"beta_fast": 4}),
        ("qwen3 yarn mscale", {"beta_slow": 3}),
        ("qwen3 yarn mscale", {"truncate": False}),
        ("qwen3 yarn mscale", {"mscale": 0.5}),
        ("llama llama3", {"factor": 2.0}),
        ("llama llama3", {"low_freq_factor": 0.5}),
        ("llama llama3", {"high_freq_factor": 9.0}),
        ("llama llama3", {"original_max_position_embeddings": 128}),
    ],
    ids=str,
)
def test_ignoring_a_rope_setting_would_fail_the_comparison(case, change):
    """Each setting changes transformers' logits by ten times the tolerance used above."""
    plain, config = make_model(case), make_config(case)
    config.rope_parameters.update(change)
    changed = AutoModelForCausalLM.from_config(config).eval()
    changed.load_state_dict(plain.state_dict())
    ids = torch.tensor(random_prompts("ids", config.vocab_size, [120]))
    with torch.inference_mode():
        logits = plain(ids).logits
        assert (changed(ids).logits - logits).abs().max() > 1e-3 * logits.abs().max()
