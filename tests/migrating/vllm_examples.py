"""vLLM's offline examples, retyped in short: what each imports, makes, calls and reads.

They are programs of vLLM with `nanovllm.vllm` for the modules of their imports, and another MODEL.
"""

PROMPTS = """
prompts = [
    "Hello, my name is",
    "The president of the United States is",
    "The capital of France is",
    "The future of AI is",
]
"""

ARGUMENTS = """
from nanovllm.vllm import LLM, EngineArgs
from nanovllm.vllm import FlexibleArgumentParser

parser = FlexibleArgumentParser()
engine_group = parser.add_argument_group("Engine arguments")
EngineArgs.add_cli_args(engine_group)
engine_group.set_defaults(model=MODEL)
sampling_group = parser.add_argument_group("Sampling parameters")
for name, kind in (("max-tokens", int), ("temperature", float), ("top-p", float), ("top-k", int)):
    sampling_group.add_argument("--" + name, type=kind)
parser.add_argument("--chat-template-path", type=str)
args = vars(parser.parse_args())
given = {name: args.pop(name) for name in ("max_tokens", "temperature", "top_p", "top_k")}
chat_template_path = args.pop("chat_template_path")

llm = LLM(**args)
sampling_params = llm.get_default_sampling_params()
for name, value in given.items():
    if value is not None:
        setattr(sampling_params, name, value)
"""

GENERATE = (
    PROMPTS
    + ARGUMENTS
    + """
for output in llm.generate(prompts, sampling_params):
    print(f"Prompt: {output.prompt!r}, text: {output.outputs[0].text!r}")
"""
)

CHAT = (
    ARGUMENTS
    + """
from nanovllm.vllm import RequestOutput

def print_outputs(outputs: list[RequestOutput]) -> None:
    for output in outputs:
        print(f"text: {output.outputs[0].text!r}")

conversation = [
    {"role": "system", "content": "You are a helpful assistant"},
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hello! How can I assist you today?"},
    {"role": "user", "content": "Write an essay about higher education."},
]
print_outputs(llm.chat(conversation, sampling_params, use_tqdm=False))
conversations = [conversation for _ in range(3)]
print_outputs(llm.chat(conversations, sampling_params, use_tqdm=True))
if chat_template_path is not None:
    with open(chat_template_path) as f:
        chat_template = f.read()
    print_outputs(llm.chat(conversations, sampling_params, False, chat_template=chat_template))
"""
)

LLM_ENGINE = """
from nanovllm.vllm import EngineArgs, LLMEngine, RequestOutput, SamplingParams
from nanovllm.vllm import FlexibleArgumentParser

test_prompts = [
    (
        "A robot may not injure a human being",
        SamplingParams(temperature=0.0, logprobs=1, prompt_logprobs=1),
    ),
    ("To be or not to be,", SamplingParams(temperature=0.8, top_k=5, presence_penalty=0.2)),
    (
        "What is the meaning of life?",
        SamplingParams(n=2, temperature=0.8, top_p=0.95, frequency_penalty=0.1),
    ),
]
parser = FlexibleArgumentParser(description="Demo on using the LLMEngine class directly")
parser = EngineArgs.add_cli_args(parser)
engine_args = EngineArgs.from_cli_args(parser.parse_args())
engine = LLMEngine.from_engine_args(engine_args)
request_id = 0
while test_prompts or engine.has_unfinished_requests():
    if test_prompts:
        prompt, sampling_params = test_prompts.pop(0)
        engine.add_request(str(request_id), prompt, sampling_params)
        request_id += 1
    request_outputs: list[RequestOutput] = engine.step()
    for request_output in request_outputs:
        if request_output.finished:
            print(f"text: {request_output.outputs[0].text!r} of {request_output.request_id}")
"""

RESET_KV = """
from nanovllm.vllm import EngineArgs, LLMEngine, SamplingParams
from nanovllm.vllm import FlexibleArgumentParser

parser = EngineArgs.add_cli_args(FlexibleArgumentParser(description="Demo"))
engine = LLMEngine.from_engine_args(EngineArgs.from_cli_args(parser.parse_args()))
params = SamplingParams(temperature=0.0, logprobs=1, prompt_logprobs=1, max_tokens=16)
engine.add_request("0", "A robot may not injure a human being", params)
step_id = 0
while engine.has_unfinished_requests():
    if step_id == 10:
        engine.reset_prefix_cache(reset_running_requests=True)
    for request_output in engine.step():
        if request_output.finished:
            print(f"text: {request_output.outputs[0].text!r}")
    step_id += 1
"""

ASYNC_STREAMING = """
import asyncio

from nanovllm.vllm import SamplingParams
from nanovllm.vllm import AsyncEngineArgs
from nanovllm.vllm import RequestOutputKind
from nanovllm.vllm import AsyncLLM

async def stream_response(engine: AsyncLLM, prompt: str, request_id: str) -> None:
    sampling_params = SamplingParams(
        max_tokens=20, temperature=0.8, top_p=0.95, seed=42, output_kind=RequestOutputKind.DELTA
    )
    print("text: ", end="")
    async for output in engine.generate(
        request_id=request_id, prompt=prompt, sampling_params=sampling_params
    ):
        for completion in output.outputs:
            if completion.text:
                print(completion.text, end="", flush=True)
        if output.finished:
            print(" finished")
            break

async def main() -> None:
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model=MODEL, enforce_eager=True))
    try:
        for i, prompt in enumerate(["The future of artificial intelligence is", "In a galaxy"]):
            await stream_response(engine, prompt, f"stream-example-{i}")
    finally:
        engine.shutdown()

asyncio.run(main())
"""

METRICS = (
    PROMPTS
    + """
from nanovllm.vllm import LLM, SamplingParams
from nanovllm.vllm import Counter, Gauge, Histogram, Vector

llm = LLM(model=MODEL, disable_log_stats=False)
for output in llm.generate(prompts, SamplingParams(temperature=0.8, top_p=0.95)):
    print(f"Prompt: {output.prompt!r}, text: {output.outputs[0].text!r}")
for metric in llm.get_metrics():
    if isinstance(metric, Gauge):
        print(f"{metric.name} (gauge) = {metric.value}")
    elif isinstance(metric, Counter):
        print(f"{metric.name} (counter) = {metric.value}")
    elif isinstance(metric, Vector):
        print(f"{metric.name} (vector) = {metric.values}")
    elif isinstance(metric, Histogram):
        print(metric.name, metric.sum, metric.count, metric.buckets.items())
"""
)

RUN = {
    "generate": GENERATE,
    "chat": CHAT,
    "llm_engine_example": LLM_ENGINE,
    "llm_engine_reset_kv": RESET_KV,
    "async_llm_streaming": ASYNC_STREAMING,
    "metrics": METRICS,
}
"""Those that use more of vLLM's than LLM and SamplingParams, by name."""
