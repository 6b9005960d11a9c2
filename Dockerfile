# nanovllm's server on a CPU. docs/server.md explains it: "In a container".
#   docker build -t nanovllm .
#   docker run -p 127.0.0.1:8000:8000 -v nanovllm:/home/nanovllm/.cache nanovllm Qwen/Qwen3-0.6B

FROM python:3.12-slim-bookworm AS build
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
RUN python -m venv /opt/nanovllm
WORKDIR /src
COPY constraints.txt pyproject.toml README.md LICENSE ./
COPY nanovllm nanovllm
COPY docs docs
# torch without CUDA, from PyTorch's own index: a tenth of the size. Its headers, tests and tools
# are a fifth of the rest.
RUN /opt/nanovllm/bin/pip install --extra-index-url https://download.pytorch.org/whl/cpu \
        -c constraints.txt '.[server]' \
    && /opt/nanovllm/bin/pip uninstall -y pip \
    && torch=/opt/nanovllm/lib/python3.12/site-packages/torch \
    && rm -r "$torch/include" "$torch/test" \
    && find "$torch/bin" -type f ! -name torch_shm_manager -delete

FROM python:3.12-slim-bookworm
# gcc compiles the kernels for the processor of the machine that runs the container, at the first
# start: 5 seconds. The volume keeps them, and downloaded models.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 10001 --create-home nanovllm \
    && install -d -o nanovllm -g nanovllm -m 0700 /home/nanovllm/.cache
COPY --from=build /opt/nanovllm /opt/nanovllm
ENV PATH=/opt/nanovllm/bin:$PATH PYTHONUNBUFFERED=1
USER 10001
WORKDIR /home/nanovllm
VOLUME /home/nanovllm/.cache
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=300s --retries=3 \
    CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
# Every interface of the container; who can reach it is what `docker run -p` says.
ENTRYPOINT ["nanovllm", "serve", "--host", "0.0.0.0"]
