"""Vectors of texts a second, beside sentence-transformers, on the same checkpoint.

    python -m benchmarks.embeddings PYTHON

PYTHON is an interpreter that has sentence-transformers. Each engine is a process of its own; they
take turns, and each round has new texts. Without --model: random weights in the shape of
Qwen3-Embedding-0.6B, or in another with --layers. The last column is sentence-transformers' time
divided by ours: the median over rounds. The engines' vectors are compared, too.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

Vectors = list[list[float]]
Embed = Callable[[list[str]], Vectors]

CASES = {
    "short": (64, 8, 24),
    "passages": (32, 100, 140),
    "mixed": (48, 8, 200),
    "long": (4, 900, 1000),
}
"""By name: how many texts, and the least and the most words of one."""


def texts(case: str, seed: int) -> list[str]:
    """Return texts of random words."""
    from nanovllm import demo_model

    rng = random.Random(f"{case} {seed}")
    words = " ".join(answer for _, answer in demo_model.entries()).split()
    count, least, most = CASES[case]
    return [" ".join(rng.choices(words, k=rng.randint(least, most))) for _ in range(count)]


def make_model(directory: Path, num_layers: int) -> None:
    """Write a random checkpoint in the form of sentence-transformers."""
    import torch
    from transformers import Qwen3Config, Qwen3Model

    from nanovllm import demo_model

    config = Qwen3Config(
        vocab_size=151669,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=num_layers,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=32768,
        dtype="bfloat16",
    )
    torch.set_default_dtype(torch.bfloat16)
    Qwen3Model(config).save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(demo_model.MODEL) / name, directory)
    kinds = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
    modules = [
        {
            "idx": index,
            "name": str(index),
            "path": path,
            "type": f"sentence_transformers.models.{kind}",
        }
        for index, (path, kind) in enumerate(kinds.items())
    ]
    (directory / "modules.json").write_text(json.dumps(modules))
    (directory / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": 1024, "pooling_mode_lasttoken": True}
    pooling["pooling_mode_mean_tokens"] = False
    (directory / "1_Pooling/config.json").write_text(json.dumps(pooling))


def load(engine: str, model: str, dtype: str) -> Embed:
    """Return what makes vectors of texts."""
    if engine == "nanovllm":
        from nanovllm import LLM

        llm = LLM(model, dtype=dtype, max_model_len=4096)

        def embed(given: list[str]) -> Vectors:
            return [output.outputs.embedding for output in llm.embed(given, use_tqdm=False)]

        return embed
    import torch
    from sentence_transformers import SentenceTransformer

    options = {"dtype": getattr(torch, dtype)}
    transformer = SentenceTransformer(model, device="cpu", model_kwargs=options)

    def encode(given: list[str]) -> Vectors:
        found: Vectors = transformer.encode(given).tolist()
        return found

    return encode


def serve(engine: str, model: str, dtype: str) -> None:
    """Answer each line of texts with the seconds that their vectors took, and the vectors."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    embed = load(engine, model, dtype)
    embed(["warm up"])
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        given = json.loads(line)
        start = time.perf_counter()
        vectors = embed(given)
        print(json.dumps([time.perf_counter() - start, vectors]), file=answers, flush=True)


class Engine:
    """A process that makes vectors. It is stopped while another one runs."""

    def __init__(self, python: str, name: str, model: str, dtype: str) -> None:
        command = [python, "-m", "benchmarks.embeddings", "--serve", name, "--model", model]
        self._process = subprocess.Popen(
            [*command, "--dtype", dtype], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._read() == "ready\n"
        self._process.send_signal(signal.SIGSTOP)

    def embed(self, given: list[str]) -> tuple[float, Vectors]:
        """Return the seconds that the vectors of texts took, and the vectors."""
        assert self._process.stdin is not None
        self._process.send_signal(signal.SIGCONT)
        self._process.stdin.write(json.dumps(given) + "\n")
        self._process.stdin.flush()
        seconds, vectors = json.loads(self._read())
        self._process.send_signal(signal.SIGSTOP)
        return seconds, vectors

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()

    def _read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()


def compare(python: str, model: str, args: argparse.Namespace) -> None:
    """Print a line for each case."""
    engines = [
        Engine(sys.executable, "nanovllm", model, args.dtype),
        Engine(python, "sentence-transformers", model, args.dtype),
    ]
    try:
        print("case      texts  nanovllm  sentence-transformers  ratio  least cosine", flush=True)
        for case in args.cases:
            times: list[list[float]] = []
            cosines = []
            for number in range(args.rounds):
                given = texts(case, number)
                order = engines if number % 2 == 0 else engines[::-1]
                found = {engine: engine.embed(given) for engine in order}
                times.append([found[engine][0] for engine in engines])
                pairs = zip(*(found[engine][1] for engine in engines), strict=True)
                cosines += [sum(a * b for a, b in zip(*pair, strict=True)) for pair in pairs]
            ours, theirs = (median(column) for column in zip(*times, strict=True))
            ratio = median(other / own for own, other in times)
            print(
                f"{case:9} {CASES[case][0]:5}  {ours:6.2f} s  {theirs:19.2f} s  {ratio:5.2f}  "
                f"{min(cosines):.4f}",
                flush=True,
            )
    finally:
        for engine in engines:
            engine.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("python", nargs="?", help="an interpreter that has sentence-transformers")
    parser.add_argument("--model", help="a checkpoint's directory")
    parser.add_argument("--layers", type=int, default=28, help="of the random weights")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--serve", metavar="ENGINE", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve is not None:
        serve(args.serve, args.model, args.dtype)
        return
    if args.python is None:
        parser.error("name an interpreter that has sentence-transformers")
    with tempfile.TemporaryDirectory() as directory:
        if args.model is None:
            make_model(Path(directory), args.layers)
        compare(args.python, args.model or directory, args)


if __name__ == "__main__":
    main()
