"""Send requests to a server all at once, and read the streams of their answers.

Prints a line of JSON: output tokens, seconds, and seconds of this process's CPU time. It speaks
HTTP over asyncio's own streams, so that it takes as little as possible from a server that shares
its cores. For measuring a server of your own, use a load generator: docs/server.md.
"""

import argparse
import asyncio
import json
import random
import time
from typing import Any
from urllib.parse import urlsplit

TOKEN_IDS = range(256, 1000)
"""The tokens of random prompts: text in nearly every vocabulary."""


def random_prompts(num_prompts: int, length: int, seed: int) -> list[list[int]]:
    """Return prompts of random token ids, each of `length` tokens."""
    rng = random.Random(seed)
    return [rng.choices(TOKEN_IDS, k=length) for _ in range(num_prompts)]


async def answer(host: str, port: int, body: dict[str, Any]) -> int:
    """Post to /v1/completions, read the stream to its end, and return the output tokens.

    Raises:
        RuntimeError: the server refuses, or its answer has no usage.
    """
    content = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection(host, port, limit=2**24)
    try:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}:{port}\r\nConnection: close\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
        writer.write(head.encode() + content)
        status = await reader.readline()
        if status.split()[1:2] != [b"200"]:
            raise RuntimeError(f"the server answers {(status + await reader.read()).decode()}")
        usage = None
        async for line in reader:
            if b'"usage":{' in line:
                usage = json.loads(line.partition(b"data:")[2])["usage"]
        if usage is None:
            raise RuntimeError("the answer has no usage: it broke off")
        return int(usage["completion_tokens"])
    finally:
        writer.close()


async def load(args: argparse.Namespace) -> dict[str, float]:
    """Send all requests, and return what they took."""
    url = urlsplit(args.url)
    assert url.hostname is not None
    assert url.port is not None
    options = {"max_tokens": args.output_len, "temperature": 0, "ignore_eos": True, "stream": True}
    options["stream_options"] = {"include_usage": True}
    prompts = random_prompts(args.num_prompts, args.input_len, args.seed)
    start = time.perf_counter()
    busy = time.process_time()
    counts = await asyncio.gather(
        *(answer(url.hostname, url.port, {"prompt": prompt, **options}) for prompt in prompts)
    )
    seconds = time.perf_counter() - start
    return {"tokens": sum(counts), "seconds": seconds, "busy": time.process_time() - busy}


def main() -> None:
    """Run the load and print its line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.load_client", description=__doc__)
    parser.add_argument("url", help="such as http://127.0.0.1:8000")
    parser.add_argument("--num-prompts", type=int, default=128, help="requests at once")
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    print(json.dumps(asyncio.run(load(parser.parse_args()))))


if __name__ == "__main__":
    main()
