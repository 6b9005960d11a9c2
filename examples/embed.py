"""The engine inside a web application: `python examples/embed.py [MODEL]`. Needs `fastapi`.

    curl -N 'http://127.0.0.1:8080/explain?term=paged%20attention'

All requests share the engine's batches. When a client goes away, FastAPI cancels the task, which
ends the generation and frees its memory.
"""

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import uvicorn
from fastapi import FastAPI
from fastapi.responses import StreamingResponse

from nanovllm import AsyncLLM, SamplingParams, demo_model

MODEL = sys.argv[1] if len(sys.argv) > 1 else demo_model.MODEL
PARAMS = SamplingParams(temperature=0, max_tokens=100)


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    app.state.llm = AsyncLLM(MODEL)
    yield
    app.state.llm.shutdown()


app = FastAPI(lifespan=lifespan)


@app.get("/explain")
async def explain(term: str) -> StreamingResponse:
    async def text() -> AsyncIterator[str]:
        message = {"role": "user", "content": f"What is {term}?"}
        prompt = app.state.llm.render([message], add_generation_prompt=True)
        async for delta in app.state.llm.stream(prompt, PARAMS):
            yield delta.text

    return StreamingResponse(text(), media_type="text/plain")


if __name__ == "__main__":
    uvicorn.run(app, port=8080)
