"""Flags that vLLM's users type: taken, or refused with one line that says what to use."""

import pytest

from nanovllm.apps.cli import main as cli
from nanovllm.vllm import EngineArgs, FlexibleArgumentParser


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("serve m --block-size 16", "--block-size 16 is not supported: use --kvcache-block-size ("),
        ("serve m --block_size=16", "--block-size 16 is not supported: use --kvcache-block-size ("),
        ("chat m -tp 1 --swap-space 4", "--swap-space 4 is not supported: use --kv-offload-gib"),
        ("serve m --compilation-config 5", "leave it out, or use --enforce-eager for none"),
        ("serve m --ssl-keyfile x", "--ssl-keyfile x is not supported: put a proxy with TLS"),
        ("serve m --allowed-origins *", "use --cors-origins ("),
        ("serve m --no-enable-auto-tool-choice", "it is always on; leave it out"),
        ("serve a --model b", "give the model once: 'a' or --model"),
        ("serve m --enable-auto-tool-choice --max_num_seqs 0", "must be an integer from 1 to"),
        ("generate m x --pipeline-parallel-size 1 --max_num_seqs 0", "integer from 1 to"),
        ("serve m --trust-remote-code --max-num-seqs 0", "must be an integer from 1 to"),
        ("serve m --lora-modules a=/b --max-num-seqs 0", "must be an integer from 1 to"),
        ("serve m --cors-origins * --max-num-seqs 0", "must be an integer from 1 to"),
        ("serve m --swap-spac 4", "there is no flag --swap-spac "),
        ("serve m --hf-overrides.a.b 4", """.b; give --hf-overrides '{"a": {"b": ...}}'"""),
    ],
)
def test_flags_of_vllm(line: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(line.split()) == 2
    printed = capsys.readouterr().err
    assert message in printed
    assert printed.count("\n") == 1


def test_model_flag(capsys: pytest.CaptureFixture[str]) -> None:
    """The words are prompts then, and a directory may have spaces."""
    for words in (["--model", "/no/such model", "Hi", "there"], ["Hi", "--model=/no/such model"]):
        assert cli.main(["generate", *words]) == 2
        assert "model directory '/no/such model' does not exist" in capsys.readouterr().err
    assert cli.main(["chat", "--model", "/no/such"]) == 2
    assert "model directory '/no/such' does not exist" in capsys.readouterr().err


def test_helps_do_not_show_them(capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["serve", "--help"])
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
