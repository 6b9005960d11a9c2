"""Fixtures that several folders share. Imports no torch at module level: the scheduler's tests run
without it.
"""

import contextlib
import ctypes
import functools
import gc
import importlib.util
import logging
import os
import signal
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from filelock import FileLock, Timeout

from tests.every_case import EVERY_CASE

if TYPE_CHECKING:
    from nanovllm import LLM

os.environ.setdefault("OMP_NUM_THREADS", "1")  # the models are too small for more threads
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# A shell starts background jobs with Ctrl-C ignored, and their children inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


def has_cuda() -> bool:
    """Return whether this process can use a GPU, without importing torch."""
    try:
        return ctypes.CDLL("libcuda.so.1").cuInit(0) == 0
    except OSError:
        return False


if "SIMULATED_GPU" in os.environ:  # a compute capability, such as 90
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    from tests.kernels.triton.simulator import driver

    driver.install(int(os.environ["SIMULATED_GPU"]))
elif not has_cuda():
    os.environ["TRITON_INTERPRET"] = "1"  # triton reads it when it is imported
if importlib.util.find_spec("triton") is None:  # there are no wheels for this system
    collect_ignore_glob = ["kernels/triton/*"]


LONGEST = """
    test_row_pool test_tensor_parallel test_invariance test_real_model test_real_gemma
    test_cuda_graph_drafts test_families test_hub test_draft_network test_eagle3 test_mtp
    test_branches test_regressions test_paged_attention test_ops test_experts test_build test_main
    test_cuda_graph test_fused_step test_speculation
    test_native_invariance test_async_llm test_draft_model test_attention test_hybrids
    test_structured_outputs test_fork test_serve test_fuzz_checkpoint test_demo_model test_mixtures
    test_random_runs test_windows test_draft_controller test_scripts
"""
"""The files that take longest, in about this order. All of tests/ray comes with test_row_pool."""


@pytest.fixture(autouse=True, scope="module")
def frozen() -> Iterator[None]:
    """Keep what a file leaves behind from the garbage collector, as what imports make.

    Without it, one collection takes two seconds late in a run.
    """
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def log_level() -> Iterator[None]:
    """A server that ran in this process leaves the level of its log behind: see `Log`."""
    yield
    logging.getLogger("nanovllm").setLevel(logging.NOTSET)


def pytest_configure(config: pytest.Config) -> None:
    """Let xdist's workers take whole files in the order of `pytest_collection_modifyitems`."""
    config.option.loadscopereorder = False
    config.addinivalue_line("markers", "long: runs with EVERY_CASE=1 alone")
    config.addinivalue_line("markers", "of_engines: a server of several models answers otherwise")
    config.addinivalue_line("markers", "spawned: `make_llm` spawns ranks, as users' engines do")
    thinned = "one of n cases of each dtype; all of them on a GPU, or with EVERY_CASE=1"
    config.addinivalue_line("markers", f"thinned(n): {thinned}")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that take longest, so that none of them runs last and alone."""
    if not EVERY_CASE:
        items[:] = _of_each_run(items)
    places = {name: place for place, name in enumerate(LONGEST.split())}
    items.sort(key=lambda item: places.get(item.path.stem, len(places)))


def _of_each_run(items: list[pytest.Item]) -> Iterator[pytest.Item]:
    """Yield the cases that run without EVERY_CASE: see the markers in `pytest_configure`."""
    seen: Counter[tuple[Path, str, object]] = Counter()
    on_gpu = has_cuda()
    for item in items:
        if item.get_closest_marker("long") is not None:
            continue
        thinned = item.get_closest_marker("thinned")
        # The outermost parameter changes fastest: with n dtypes, all cases that are kept had one.
        dtype = item.callspec.params.get("dtype") if hasattr(item, "callspec") else None
        place = item.path, getattr(item, "originalname", item.name), dtype
        kept = thinned is None or on_gpu or seen[place] % thinned.args[0] == 0
        seen[place] += 1
        if kept:
            yield item


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[object]:
    """Keep the garbage collector from the million objects that imports make and never free.

    Of several processes, the first one collects alone. It compiles all Python modules that are
    imported and the C kernels, which the others then find compiled.
    """
    lock = FileLock(Path(tempfile.gettempdir(), f"nanovllm-tests-{os.getuid()}.lock"))
    gc.disable()
    try:
        with contextlib.ExitStack() as held:
            if "PYTEST_XDIST_WORKER" in os.environ:
                try:
                    held.enter_context(lock.acquire(blocking=False))
                except Timeout:
                    with lock:
                        pass
            return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give tests/ray to one worker with --dist loadfile: each would start a cluster of its own."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class LoadFiles(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file: str = super()._split_scope(nodeid)
            return "tests/ray" if file.startswith("tests/ray/") else file

    return LoadFiles(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Skip a test that needs more GPUs than there are. Without a GPU, ranks run on the CPU."""
    try:
        return (yield)
    except Exception as error:
        if "GPUs, torch finds" in str(error):
            pytest.skip(str(error))
        raise


@pytest.fixture
def inference_mode() -> Iterator[None]:
    """Run the test without autograd, as the engine runs kernels."""
    import torch

    with torch.inference_mode():
        yield


@pytest.fixture
def as_rank(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    """Return a function that makes this process one rank among several."""
    from nanovllm.utils import distributed

    def become(rank: int, size: int) -> None:
        found = distributed.TensorParallel(rank, size)
        monkeypatch.setattr(distributed, "_tensor_parallel", found)

    return become


@pytest.fixture(scope="session")
def shared_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Return a random checkpoint with the given config.

    Checkpoints are made once a session; tests must not write to them.
    """
    made: dict[str, str] = {}

    def make(**config: Any) -> str:
        from tests.checkpoints import make_checkpoint

        name = repr(sorted(config.items()))
        if name not in made:
            made[name] = make_checkpoint(tmp_path_factory.mktemp("checkpoint"), **config)
        return made[name]

    return make


@pytest.fixture(scope="session")
def random_model(shared_checkpoint: Callable[..., str]) -> str:
    """A random float32 Qwen3 checkpoint without a tokenizer: odd vocabulary, 2 KV heads."""
    return shared_checkpoint()


@pytest.fixture
def make_llm(request: pytest.FixtureRequest) -> Iterator[Callable[..., "LLM"]]:
    """`LLM`, shut down when the test ends. Its ranks are forked, but for tests marked `spawned`."""
    from nanovllm import LLM
    from tests.forked_ranks import forked_ranks

    made = []
    spawned = request.node.get_closest_marker("spawned")

    def make(model: str | Path, **options: Any) -> LLM:
        with contextlib.nullcontext() if spawned else forked_ranks():
            made.append(LLM(str(model), **options))
        return made[-1]

    yield make
    for llm in made:
        llm.shutdown()


@pytest.fixture(scope="session")
def random_llm(random_model: str) -> Iterator["LLM"]:
    """The random model with blocks of 4 tokens and a short max_model_len, for the whole session."""
    from nanovllm import LLM

    llm = LLM(random_model, dtype="float32", max_model_len=48, kvcache_block_size=4)
    yield llm
    llm.shutdown()


@pytest.fixture(scope="session")
def demo_llm() -> Iterator["LLM"]:
    """The demo model for the whole session.

    It has no prefix cache, so the same request is the same arithmetic each time.
    """
    from nanovllm import LLM, demo_model
    from tests.glossary import OPTIONS

    llm = LLM(demo_model.MODEL, enable_prefix_caching=False, **OPTIONS)
    yield llm
    llm.shutdown()


@pytest.fixture(scope="session")
def tensor_parallel_llm() -> Iterator[Callable[[str, int], "LLM"]]:
    """Return an LLM of a model on a number of ranks, in float32.

    Ranks take long to start, so each LLM is started once and kept for the session: tests must not
    kill it.
    """
    from nanovllm import LLM, demo_model
    from tests.forked_ranks import forked_ranks

    made = []

    @functools.cache
    def make(model: str, tensor_parallel_size: int) -> LLM:
        with forked_ranks():
            llm = LLM(
                model,
                tensor_parallel_size=tensor_parallel_size,
                dtype="float32",
                max_model_len=256,
                max_num_batched_tokens=64,
                kvcache_block_size=4,
                # The random model's pool is so small that large batches preempt.
                num_kvcache_blocks=2048 if model == demo_model.MODEL else 100,
            )
        made.append(llm)
        return llm

    yield make
    for llm in made:
        llm.shutdown()


@pytest.fixture
def preempted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(sequence id, number of output tokens) of each preemption during the test.

    Admissions leave no room to grow: for the test's short sequences it would be all that they need.
    """
    from nanovllm.kv.groups import state
    from nanovllm.scheduler.scheduler import Scheduler

    found: list[tuple[int, int]] = []
    preempt = Scheduler.preempt

    def record(self: Scheduler, seq: Any) -> None:
        found.append((seq.seq_id, seq.num_output_tokens))
        preempt(self, seq)

    monkeypatch.setattr(Scheduler, "preempt", record)
    monkeypatch.setattr(state, "ROOM_TO_GROW", 0)
    return found


@pytest.fixture
def idle_afterwards(demo_llm: "LLM") -> Iterator[None]:
    """Check after the test that it left nothing in `demo_llm`."""
    from tests.helpers import assert_idle

    yield
    was_idle = demo_llm.engine.is_finished()
    while not demo_llm.engine.is_finished():  # for the tests that follow
        demo_llm.engine.step()
    assert was_idle
    assert_idle(demo_llm)


@pytest.fixture
def no_endless_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail, instead of hanging, when a stream waits for a request that the engine lost."""
    from nanovllm.engine.llm_engine import LLMEngine

    run_step, num_idle_steps = LLMEngine.run_step, 0

    def guarded(self: LLMEngine) -> None:
        nonlocal num_idle_steps
        num_idle_steps = 0 if self.scheduler.num_unfinished else num_idle_steps + 1
        assert num_idle_steps < 200, "a stream waits for a request that is gone"
        run_step(self)

    monkeypatch.setattr(LLMEngine, "run_step", guarded)
