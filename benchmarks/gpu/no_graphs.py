"""A plugin of pytest that turns CUDA graphs off: `pytest -p benchmarks.gpu.no_graphs`."""


def pytest_configure() -> None:
    """Let no network of this process capture graphs."""
    from nanovllm.features.graphs import step_runners

    vars(step_runners)["can_capture"] = lambda device: False
