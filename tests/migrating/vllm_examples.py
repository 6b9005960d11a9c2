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

BASIC = (
    PROMPTS
    + """
from nanovllm.vllm import LLM, SamplingParams

llm = LLM(model=MODEL)
for output in llm.generate(prompts, SamplingParams(temperature=0.8, top_p=0.95)):
    print(f"Prompt: {output.prompt!r}, text: {output.outputs[0].text!r}")
"""
)

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

DEFAULT_SAMPLING = (
    PROMPTS
    + """
from nanovllm.vllm import LLM

llm = LLM(model=MODEL, generation_config="auto")
sampling_params = llm.get_default_sampling_params()
sampling_params.temperature = 0.5
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

PREFIX_CACHING = (
    PROMPTS
    + """
from nanovllm.vllm import LLM, SamplingParams
from nanovllm.vllm import cleanup_dist_env_and_memory

prefix = "You are an expert school principal, skilled in managing faculty and staff. " * 4
generating_prompts = [prefix + prompt for prompt in prompts]
sampling_params = SamplingParams(temperature=0.0)
regular_llm = LLM(model=MODEL, gpu_memory_utilization=0.4)
regular = [o.outputs[0].text for o in regular_llm.generate(generating_prompts, sampling_params)]
del regular_llm
cleanup_dist_env_and_memory()

llm = LLM(model=MODEL, enable_prefix_caching=True, gpu_memory_utilization=0.4)
llm.generate(generating_prompts[0], sampling_params)
cached = [o.outputs[0].text for o in llm.generate(generating_prompts, sampling_params)]
print(f"text: {cached!r}; the same: {regular == cached}")
"""
)

AUTOMATIC_PREFIX_CACHING = """
import time

from nanovllm.vllm import LLM, SamplingParams

table = "# Table" + "| 1 | John Doe | 29 | Engineer | USA |" * 20

def get_generation_time(llm, sampling_params, prompts):
    start_time = time.time()
    output = llm.generate(prompts, sampling_params=sampling_params)
    print(f"text: {output[0].outputs[0].text} in {time.time() - start_time} seconds.")

llm = LLM(model=MODEL, enable_prefix_caching=True)
sampling_params = SamplingParams(temperature=0, max_tokens=20)
for name in ("John Doe", "Zack Blue"):
    get_generation_time(llm, sampling_params, table + f"Question: the age of {name}? Answer: ")
"""

STRUCTURED_OUTPUTS = '''
from enum import Enum

from pydantic import BaseModel

from nanovllm.vllm import LLM, SamplingParams
from nanovllm.vllm import StructuredOutputsParams

class CarType(str, Enum):
    sedan = "sedan"
    suv = "SUV"

class CarDescription(BaseModel):
    brand: str
    car_type: CarType

grammar = """
root ::= select_statement
select_statement ::= "SELECT " column " from " table
column ::= "col_1 " | "col_2 "
table ::= "table_1 " | "table_2 "
"""
llm = LLM(model=MODEL, max_model_len=100)
for structured in (
    StructuredOutputsParams(choice=["Positive", "Negative"]),
    StructuredOutputsParams(regex=r"\\w+@\\w+\\.com\\n"),
    StructuredOutputsParams(json=CarDescription.model_json_schema()),
    StructuredOutputsParams(grammar=grammar),
):
    sampling_params = SamplingParams(
        structured_outputs=structured, stop=["\\n"] if structured.regex else None
    )
    outputs = llm.generate(prompts="Classify: vLLM is wonderful!", sampling_params=sampling_params)
    print(f"text: {outputs[0].outputs[0].text!r}")
'''

REPRODUCIBILITY = (
    PROMPTS
    + """
import random

from nanovllm.vllm import LLM, SamplingParams

llm = LLM(model=MODEL, seed=42)
for output in llm.generate(prompts, SamplingParams(temperature=0.8, top_p=0.95)):
    print(f"Prompt: {output.prompt!r}, text: {output.outputs[0].text!r}")
print(random.randint(0, 100))
"""
)

CONTEXT_EXTENSION = """
from nanovllm.vllm import LLM, SamplingParams

hf_overrides = {
    "rope_parameters": {
        "rope_theta": 10000.0,
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 4096,
    },
    "max_model_len": 4096 * 4,
}
llm = LLM(model=MODEL, hf_overrides=hf_overrides)
conversation = [{"role": "user", "content": "Hello"}]
outputs = llm.chat(conversation, SamplingParams(temperature=0.8, top_p=0.95), use_tqdm=False)
print(f"text: {outputs[0].outputs[0].text!r}")
"""

LONG_PROMPT = """
from nanovllm.vllm import LLM, SamplingParams

sampling_params = SamplingParams(
    temperature=0.7, top_p=0.8, top_k=20, repetition_penalty=1.05, detokenize=True, max_tokens=16
)
llm = LLM(
    model=MODEL,
    max_model_len=1048576,
    tensor_parallel_size=1,
    enforce_eager=True,
    enable_chunked_prefill=True,
    max_num_batched_tokens=131072,
)
for output in llm.generate(["All work and no play makes Jack a dull boy. " * 40], sampling_params):
    print(f"Length: {len(output.prompt_token_ids)}, text: {output.outputs[0].text!r}")
"""

GGUF = """
from nanovllm.vllm import LLM, SamplingParams

llm = LLM(model=GGUF_FILE, tokenizer=MODEL)
questions = ["How many helicopters can a human eat?", "What's the future of AI?"]
prompts = [[{"role": "user", "content": question}] for question in questions]
for output in llm.chat(prompts, SamplingParams(temperature=0, max_tokens=16)):
    print(f"Prompt: {output.prompt!r}, text: {output.outputs[0].text!r}")
"""

SIMPLE_PROFILING = (
    PROMPTS
    + """
from nanovllm.vllm import LLM, SamplingParams

llm = LLM(model=MODEL, tensor_parallel_size=1)
llm.start_profile()
outputs = llm.generate(prompts, SamplingParams(temperature=0.8, top_p=0.95))
llm.stop_profile()
"""
)

RUN = {
    "basic": BASIC,
    "generate": GENERATE,
    "chat": CHAT,
    "llm_engine_example": LLM_ENGINE,
    "llm_engine_reset_kv": RESET_KV,
    "async_llm_streaming": ASYNC_STREAMING,
    "metrics": METRICS,
    "prefix_caching": PREFIX_CACHING,
    "automatic_prefix_caching": AUTOMATIC_PREFIX_CACHING,
    "structured_outputs": STRUCTURED_OUTPUTS,
    "reproducibility": REPRODUCIBILITY,
    "context_extension": CONTEXT_EXTENSION,
    "qwen_1m": LONG_PROMPT,
    "gguf_inference": GGUF,
}
"""Those that run, by name."""

SAY_WHAT_TO_USE = {
    "basic_with_model_default_sampling": (DEFAULT_SAMPLING, r"x\.clone\(temperature=0\.5\)"),
    "simple_profiling": (SIMPLE_PROFILING, "make the engine with profile_dir"),
}
"""Those that do not, with the message that they end with."""
