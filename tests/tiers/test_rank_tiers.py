"""What a runner with tiers refuses. tests/test_kv_tiers.py has what it does."""

import pytest

from nanovllm import LLM, demo_model
from nanovllm.errors import OutOfMemoryError
from nanovllm.features.tiers import rank_tiers
from nanovllm.utils.distributed import TensorParallel


@pytest.mark.parametrize(("ranks", "gib"), [(1, 0.015), (1, 0.0149999), (2, 0.02)])
def test_host_memory_that_does_not_fit_beside_the_pool_is_refused(
    monkeypatch: pytest.MonkeyPatch, ranks: int, gib: float
) -> None:
    """Symptom: the system kills the process when slots and pool are full."""
    monkeypatch.setattr(rank_tiers, "available_memory", lambda: int(0.015 * 2**30))
    monkeypatch.setattr(rank_tiers, "tensor_parallel", lambda: TensorParallel(0, ranks))
    with pytest.raises(OutOfMemoryError, match=f"kv_offload_gib {gib:g} is more host memory than"):
        LLM(demo_model.MODEL, max_model_len=64, num_kvcache_blocks=8, kv_offload_gib=gib)
