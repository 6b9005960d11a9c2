"""The engine on macOS and on Windows, as far as Linux can show it: in a process that hides from
nanovllm what those systems lack. The rest of that process, torch and Python itself, sees Linux.

This file is the program of that process, too: `python tests/test_other_systems.py win32`.
So it imports nothing from outside the standard library at its top.
"""

import builtins
import contextlib
import io
import os
import runpy
import subprocess
import sys
import tempfile
import threading
import time
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

PACKAGE = str(Path(__file__).parent.parent / "nanovllm") + os.sep
PYTHONS = str(Path(os.__file__).parent) + os.sep
"""The directory of the standard library."""
LINUX = {
    "os": "sched_getaffinity sched_setaffinity posix_fadvise POSIX_FADV_WILLNEED memfd_create",
    "mmap": "MADV_HUGEPAGE MADV_REMOVE MAP_POPULATE",
    "select": "epoll POLLRDHUP",
    "signal": "SIGRTMIN SIGPWR sigwaitinfo sigtimedwait",
    "resource": "prlimit",
}
"""What macOS lacks, by module."""
POSIX = {
    "os": "sysconf register_at_fork fork forkpty geteuid getuid getegid getgid killpg setsid uname "
    "setpriority PRIO_PROCESS statvfs ST_NOEXEC fchmod chown O_NOFOLLOW O_NONBLOCK O_CLOEXEC "
    "O_DIRECTORY preadv pwritev pread pwrite readv writev mkfifo setpgid getpgid",
    "mmap": "MAP_PRIVATE MAP_ANONYMOUS MAP_ANON MAP_SHARED MADV_DONTNEED PROT_READ",
    "select": "poll",
    "signal": "SIGKILL SIGPROF SIGHUP SIGALRM SIGSTOP SIGCONT SIGUSR1 SIGCHLD setitimer alarm "
    "ITIMER_PROF ITIMER_REAL pthread_sigmask SIG_BLOCK SIG_UNBLOCK",
    "socket": "AF_UNIX",
    **dict.fromkeys(("fcntl", "resource", "termios", "tty", "pty", "pwd", "grp"), "*"),
}
"""What Windows lacks besides; "*" is the whole module."""


class Hidden(types.ModuleType):
    """A module without some of its names, and with others."""

    def __init__(self, real: types.ModuleType, without: set[str], others: dict[str, Any]) -> None:
        super().__init__(real.__name__)
        self.__dict__.update(_real=real, _without=without, **others)

    def __getattr__(self, name: str) -> Any:
        if name in self._without:
            raise AttributeError(f"{self.__name__} has no {name} here")
        return getattr(self._real, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._real, name, value)


def is_ours(depth: int) -> bool:
    """Return whether the function that called this far up, but for Python's own, is nanovllm's."""
    frame: types.FrameType | None = sys._getframe(depth + 1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(("<", PYTHONS)) or "site-packages" in file:
            return file.startswith(PACKAGE)
        frame = frame.f_back
    return False


def hide(system: str) -> None:
    """Let nanovllm, in this process and in those that it starts, see `system`."""
    on_windows = system == "win32"
    hidden = {name: set(names.split()) for name, names in LINUX.items()}
    for name, names in POSIX.items() if on_windows else ():
        hidden[name] = hidden.get(name, set()) | set(names.split())
    others = windows() if on_windows else {}
    others.setdefault("sys", {}).update(platform=system)
    others.setdefault("subprocess", {}).update(Popen=starts(system))
    lacking = {name for name in hidden if "*" in hidden[name]}
    shown = {
        name: Hidden(__import__(name), hidden.get(name, set()), others.get(name, {}))
        for name in (hidden.keys() | others.keys()) - lacking
    }
    real_import = builtins.__import__

    def hiding(name: str, *args: Any, **kwargs: Any) -> Any:
        found = real_import(name, *args, **kwargs)
        if (name in shown or name in lacking) and is_ours(1):
            if name in lacking:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)
            return shown[name]
        return found

    def watch(event: str, args: tuple[Any, ...]) -> None:
        if event == "open" and str(args[0]).startswith(("/proc", "/sys")) and is_ours(1):
            raise FileNotFoundError(2, "there is no such file on this system", args[0])
        if on_windows and event in ("os.rename", "os.remove") and args[-1] == -1 and is_ours(1):
            moved = [str(path) for path in args[:2] if isinstance(path, str | Path)]
            if set(map(os.path.realpath, moved)) & open_files():
                raise PermissionError(13, "the file is open", *moved)

    builtins.__import__ = hiding
    sys.addaudithook(watch)
    warnings.filterwarnings("error", category=EncodingWarning, module=r"nanovllm\b")


def open_files() -> set[str]:
    """Return the paths of the files that this process has open."""
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.add(os.readlink(f"/proc/self/fd/{number}"))
    return found


def starts(system: str) -> type:
    """Return a Popen that hides the same from a program of nanovllm's."""

    class Popen(subprocess.Popen):  # type: ignore[type-arg]
        def __init__(self, command: list[str], **options: Any) -> None:
            program = next((i for i, word in enumerate(command) if word.startswith(PACKAGE)), None)
            if program is not None:
                command = [*command[:program], __file__, system, *command[program:]]
            super().__init__(command, **options)

    return Popen


def windows() -> dict[str, dict[str, Any]]:
    """Return what Windows has and Linux has not, or otherwise, by module."""
    import ctypes
    import mmap

    class Map(mmap.mmap):
        def __new__(cls, fileno: int, length: int, *, access: int = 0, offset: int = 0) -> Any:
            return super().__new__(cls, fileno, length, access=access, offset=offset)

        @property
        def madvise(self) -> Any:
            raise AttributeError("Windows has no madvise")

    def utime(path: Any, *args: Any, **kwargs: Any) -> None:
        assert not isinstance(path, int), "Windows sets no times of an open file"
        os.utime(path, *args, **kwargs)

    class Library(ctypes.CDLL):
        def __init__(self, name: str | None, *args: Any, **kwargs: Any) -> None:
            if name is None:
                raise TypeError("Windows has no library without a name")
            super().__init__(name, *args, **kwargs)

    return {
        "os": {"name": "nt", "O_BINARY": 0, "utime": utime},
        "mmap": {"mmap": Map},
        "ctypes": {"CDLL": Library},
        "subprocess": {"CREATE_NEW_PROCESS_GROUP": 0},
    }


# From here on: what runs in the process.


def usual(system: str) -> None:
    """Generate, chat and structure answers; keep KV, run a batch's files, and be refused."""
    from nanovllm import LLM, SamplingParams, demo_model

    entries = demo_model.entries()[:4]
    questions = [[{"role": "user", "content": question}] for question, _ in entries]
    greedy = SamplingParams(temperature=0, max_tokens=160)
    options: dict[str, Any] = {"max_model_len": 512, "num_kvcache_blocks": 256}
    if system == "darwin":
        options["native_kernels"] = False  # no compiler of macOS is here
    for num_threads in (1, 2):
        llm = LLM(demo_model.MODEL, num_threads=num_threads, **options)
        answers = [output["text"] for output in llm.chat(questions, greedy, use_tqdm=False)]
        assert answers == [answer for _, answer in entries], answers
        found = llm.generate("A KV cache is", greedy, use_tqdm=False)[0]["text"]
        assert found.startswith(" what stores the attention keys and values"), found
        structure(llm)
        llm.exit()
    assert entries[0][1] in command(entries[0][0])


def structure(llm: Any) -> None:
    """Ask for an answer by a grammar that is tried first, in a process with limits."""
    from nanovllm import SamplingParams
    from nanovllm.options.structured_outputs import StructuredOutputsParams

    either = " | ".join(f'"{word}"' for word in ("blue", "green", "red"))
    grammar = f"start: WORD\nWORD: ({either}) & /[a-z]+/ & /.{{3,5}}/ & /.+/ & /[^x]+/"
    structured = StructuredOutputsParams(grammar=grammar)
    params = SamplingParams(temperature=0, max_tokens=8, structured_outputs=structured)
    found = llm.generate("The sky is", params, use_tqdm=False)[0]["text"]
    assert found in ("blue", "green", "red"), found


def command(question: str) -> str:
    """Return what the command `nanovllm generate` prints."""
    from nanovllm import demo_model
    from nanovllm.apps.cli.main import main

    with contextlib.redirect_stdout(io.StringIO()) as printed:
        words = ["run", demo_model.MODEL, question, "--temperature", "0", "--max-tokens", "160"]
        assert main([*words, "--no-native-kernels", "--max-model-len", "512"]) == 0
    return printed.getvalue()


def serve(system: str) -> None:
    """Answer over HTTP, whole and as a stream, to a client that leaves in the middle, too."""
    import httpx

    from nanovllm import AsyncLLM, demo_model
    from nanovllm.apps.server.app import make_app
    from nanovllm.apps.server.serve import EngineServer, bound_socket
    from nanovllm.apps.server.server_options import ServerOptions
    from nanovllm.utils.system import allow_files

    allow_files(64)
    question, answer = demo_model.entries()[0]
    body = {"messages": [{"role": "user", "content": question}], "temperature": 0, "model": "any"}
    llm = AsyncLLM(demo_model.MODEL, native_kernels=False, max_model_len=512, num_kvcache_blocks=64)
    options = ServerOptions(port=0, served_model_name="any")
    with bound_socket(options) as listener:
        server = EngineServer(make_app(llm, options), listener)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        while not server.started:
            time.sleep(0.01)
        url = "http://{}:{}/v1/chat/completions".format(*listener.getsockname())
        with httpx.stream("POST", url, json={**body, "stream": True}) as stream:
            assert next(stream.iter_lines()).startswith("data: {")
        found = httpx.post(url, json=body).json()["choices"][0]["message"]["content"]
        assert found == answer, found
        server.should_exit = True
        thread.join()
    llm.shutdown()


def files(system: str) -> None:
    """Keep entries of KV and the rows of a batch in files, and end templates at their limits."""
    from nanovllm.apps.batch.job_files import JobFiles
    from nanovllm.chat.template_process import TemplateError, TemplateProcess
    from nanovllm.features.tiers.directory import DirectoryStore
    from nanovllm.utils import limited_process
    from nanovllm.utils.system import free_memory, physical_memory, resident_memory

    assert 0 < resident_memory() < physical_memory()
    assert 0 < free_memory() < physical_memory()
    store = DirectoryStore(Path.home() / "kv", 2**16, "0" * 16)
    for key in map(bytes, ([number] * 8 for number in range(30))):
        store.write(key, [memoryview(key * 512), memoryview(key)])
        store.settle()
    pages = bytearray(4096), bytearray(8)
    assert store.read(b"\x1d" * 8, [memoryview(page) for page in pages])
    assert pages == (b"\x1d" * 4096, b"\x1d" * 8)
    assert not store.has(b"\0" * 8), "the oldest was not removed"
    store.close()

    job = JobFiles(Path.home() / "out.jsonl", {"model": "a"})
    job.journal.append(0, b"{}")
    with job.writing(0) as file:
        file.writelines(job.journal.in_order())
    job.remove()
    job.close()
    assert job.output.read_bytes() == b"{}"
    assert not job.directory.exists()

    process = TemplateProcess()
    loop = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    limited_process._START_BYTES = 2**26
    refused(lambda: process.render("{{ 'a' * 10**10 }}", {}), TemplateError, "256 MiB")
    limited_process._START_SECONDS = 0.2  # not before: where memory is slow, that ends the first
    refused(lambda: process.render(loop, {}), TemplateError, "1 s of processor")
    assert process.render("{{ x }}", {"x": 1}) == "1"
    process.shutdown()


def refusals(system: str) -> None:
    """Ask for what Windows has not."""
    from nanovllm import LLM, demo_model
    from nanovllm.apps.cli.main import main
    from nanovllm.errors import ConfigError

    refused(lambda: LLM(demo_model.MODEL, kv_cache_dir="/tmp"), ConfigError, "which Windows keeps")
    two = {"tensor_parallel_size": 2, "device": "cpu"}
    refused(lambda: LLM(demo_model.MODEL, **two), ConfigError, "use WSL")
    for words, message in (
        ([demo_model.MODEL, "--uds", "/tmp/socket"], "leave --uds out"),
        ([f"a={demo_model.MODEL}", f"b={demo_model.MODEL}"], "a server for each model"),
    ):
        with contextlib.redirect_stderr(io.StringIO()) as printed:
            assert main(["serve", *words]) == 2
        assert message in printed.getvalue(), printed.getvalue()


def refused(call: Callable[[], object], kind: type[Exception], message: str) -> None:
    found = "it was not refused"
    try:
        call()
    except kind as error:
        found = str(error)
    assert message in found, found


if __name__ == "__main__":
    _, _system, *sys.argv = sys.argv
    hide(_system)
    if sys.argv:  # a program of nanovllm's, with its words
        runpy.run_path(sys.argv[0], run_name="__main__")
    else:
        for _part in (usual, files, *([serve, refusals] if _system == "win32" else [])):
            _part(_system)


__test__ = sys.platform == "linux"


def run(system: str) -> None:
    with tempfile.TemporaryDirectory() as home:
        done = subprocess.run(
            [sys.executable, "-X", "warn_default_encoding", __file__, system],
            env={**os.environ, "HOME": os.path.realpath(home)},
            capture_output=True,
            text=True,
            cwd=Path(PACKAGE).parent,
            timeout=200,
        )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


def test_windows() -> None:
    run("win32")


def test_macos() -> None:
    run("darwin")
