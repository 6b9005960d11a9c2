# nanovllm's server on a CPU. docs/server.md explains it: "In a container".
#   docker build -t nanovllm .
#   docker run -p 127.0.0.1:8000:8000 -v nanovllm:/home/nanovllm/.cache nanovllm Qwen/Qwen3-0.6B

FROM python:3.12-slim-bookworm AS build
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev
WORKDIR /src
COPY constraints.txt pyproject.toml README.md LICENSE ./
COPY nanovllm nanovllm
COPY docs docs
COPY tools tools
# The wheel has compiled kernels for every processor: the image needs no compiler.
RUN python -m venv /opt/build \
    && /opt/build/bin/pip install -c constraints.txt build ziglang \
    && /opt/build/bin/python -m tools.wheels "linux_$(uname -m)"
# torch without CUDA, from PyTorch's own index: a tenth of the size. A third of the rest goes, too:
# its headers, tests, tools and symbols, and byte code of modules that a server does not import.
RUN python -m venv /opt/nanovllm \
    && /opt/nanovllm/bin/pip install --extra-index-url "$TORCH_INDEX" \
        -c constraints.txt "$(echo dist/*manylinux*.whl)[server]" \
    && /opt/nanovllm/bin/pip uninstall -y pip \
    && site=$(echo /opt/nanovllm/lib/python3*/site-packages) \
    && rm -r "$site/torch/include" "$site/torch/test" \
    && find "$site/torch/bin" -type f ! -name torch_shm_manager -delete \
    && strip --strip-unneeded "$site"/torch/lib/*.so \
    && find "$site/sympy" "$site/networkx" "$site/transformers/models" \
        "$site/torch/_inductor" "$site/torch/testing" -name "*.pyc" -delete

FROM python:3.12-slim-bookworm
# The volume keeps downloaded models.
RUN useradd --uid 10001 --create-home nanovllm \
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
