"""Flags that vLLM's users type: taken, or refused with one line that says what to use."""

from typing import Any

import pytest

from nanovllm.apps.cli import main as cli
from nanovllm.apps.server.server_options import ServerOptions
from nanovllm.options.flags import given_fields
from nanovllm.vllm import EngineArgs, FlexibleArgumentParser


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("serve m --block-size 16", "there is no flag --block-size: use --kvcache-block-size ("),
        ("serve m --block_size=16", "there is no flag --block_size: use --kvcache-block-size ("),
        ("chat m -tp 1 --swap-space 4", "--swap-space 4 is not supported: use --kv-offload-gib"),
        ("serve m --compilation-config 5", "leave it out, or use --enforce-eager for none"),
        ("serve m --watermark-config 1", "there is no flag --watermark-config "),
        ("serve m --ssl-keyfile x", "there is no flag --ssl-keyfile: put a proxy with TLS"),
        ("serve m --allowed-origins *", "use --cors-origins ("),
        ("serve m --no-enable-auto-tool-choice", "is not supported: leave it out"),
        ("serve a --model b", "give the model once: 'a' or --model"),
        ("serve m --enable-auto-tool-choice --max_num_seqs 0", "must be an integer from 1 to"),
        ("generate m x --pipeline-parallel-size 1 --max_num_seqs 0", "integer from 1 to"),
        ("serve m --trust-remote-code --max-num-seqs 0", "must be an integer from 1 to"),
        ("serve m --lora-modules a=/b --max-num-seqs 0", "must be an integer from 1 to"),
        ("serve m --cors-origins * --max-num-seqs 0", "must be an integer from 1 to"),
        ("serve m --data-parallel-size 2", "is not supported: use --tensor-parallel-size"),
        ("serve m -dp 2", "-dp 2 is not supported: use --tensor-parallel-size"),
        ("serve m -O0", "-O 0 is not supported: CUDA graphs are captured for all sizes"),
        ("serve m -ep", "-ep is not supported: each rank has a part of every expert"),
        ("serve m --swap-spac 4", "there is no flag --swap-spac "),
        ("serve m --max-model-len 1.5K", "must be an integer, got '1.5K'"),
        (
            "serve m --config x.yaml",
            "there is no flag --config: put the command with its flags into a",
        ),
        ("serve --api-key k1 k2 k3", "a flag takes several values only behind a MODEL"),
        ("serve m --served-model-name", "--served-model-name: expected one argument"),
    ],
)
def test_flags_of_vllm(line: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(line.split()) == 2
    printed = capsys.readouterr().err
    assert message in printed
    assert printed.count("\n") == 1


LISTS = {
    "m --served-model-name a b --port 1": {"served_model_name": "a,b", "models": ["m"], "port": 1},
    "--model m --api-key k l --api-key o": {"api_keys": ["k", "l", "o"], "models": ["m"]},
    "x/m y/n --lora-modules a=/b c=/d": {
        "lora_modules": ["a=/b", "c=/d"],
        "models": ["x/m", "y/n"],
    },
    "--api-key k x/m y/n": {"api_keys": ["k"], "models": ["x/m", "y/n"]},
    "x/m --port 1 y/n": {"models": ["x/m", "y/n"]},
    "m --cors-origins=* null -- n": {"cors_origins": ["*", "null"], "models": ["m", "n"]},
    "m -O3 -dp 1": {"models": ["m"]},
    'm --logits-rules ["a:B","c:D"]': {"logits_rules": ["a:B", "c:D"]},
    "m --logits-rules a:B": {"logits_rules": ["a:B"]},
    "m --max-model-len 8k": {"max_model_len": 8000},
    "m --max-model-len 8K --max-num-seqs 2.5k": {"max_model_len": 8192, "max_num_seqs": 2500},
    'm --override-generation-config {"top_k":3}': {"override_generation_config": {"top_k": 3}},
}


def read(words: list[str]) -> dict[str, Any]:
    """Return the arguments as they are read, and as the options get them."""
    args = cli._parse(words)
    return vars(args) | given_fields(ServerOptions, args)


@pytest.mark.parametrize("line", LISTS)
def test_values_as_vllm_takes_them(line: str) -> None:
    """One server and one of several models read the same arguments."""
    given = read(["serve", *line.split()])
    assert {name: given[name] for name in LISTS[line]} == LISTS[line]


def test_model_flag(capsys: pytest.CaptureFixture[str]) -> None:
    """The words are prompts then, and a directory may have spaces."""
    for words in (["--model", "/no/such model", "Hi", "there"], ["Hi", "--model=/no/such model"]):
        assert cli.main(["generate", *words]) == 2
        assert "model directory '/no/such model' does not exist" in capsys.readouterr().err
    assert cli.main(["chat", "--model", "/no/such"]) == 2
    assert "model directory '/no/such' does not exist" in capsys.readouterr().err


def test_helps_do_not_show_them(capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["serve", "--help-all"])
    printed = capsys.readouterr().out
    assert "--kvcache-block-size" in printed
    assert "--block-size" not in printed
    assert "--model " not in printed


def test_parser_of_a_script() -> None:
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    parser.add_argument("--my_flag", choices=["a_b"])
    parser.set_defaults(model="m")
    args = parser.parse_args(["--max_model_len=64", "--my_flag", "a_b", "-tp", "2"])
    assert (args.model, args.max_model_len, args.my_flag) == ("m", 64, "a_b")
    assert (args.max_num_seqs, args.enable_lora, args.tensor_parallel_size) == (512, False, 2)
    expected = EngineArgs("m", max_model_len=64, tensor_parallel_size=2)
    assert EngineArgs.from_cli_args(args) == expected
    parser.add_argument("words", nargs="*")
    assert parser.parse_args(["--", "--max_model_len"]).words == ["--max_model_len"]
    for words in (["--my-flag", "x"], ["--block-size", "16"]):
        with pytest.raises(SystemExit):
            parser.parse_args(words)
