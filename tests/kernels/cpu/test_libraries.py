"""The libraries of kernels that a wheel brings: the bits that they compute, and which is opened."""

import logging
import platform
import sys

import pytest
import torch

from nanovllm.attention.spec import AttentionSpec
from nanovllm.errors import ConfigError
from nanovllm.kernels.cpu import build, library as library_module, ops
from nanovllm.kernels.cpu.calls import KERNELS
from nanovllm.kernels.cpu.variants import SLOW_BF16, VARIANTS
from tests.kernels.cpu import (
    test_experts,
    test_int_weights,
    test_layer_ops,
    test_lora_ops,
    test_ops,
    test_paged_attention,
    test_state,
    test_variants,
)
from tests.kernels.cpu.helpers import built_library, compiled, native

pytestmark = native
CPU = torch.device("cpu")
KNOWN = VARIANTS.get(platform.machine(), {})
LACKS = {
    "amx": (),
    "avx512-slow-bf16": (*build._WITHOUT_TILES, "-DSLOW_DPBF16"),
    "avx512-bf16": build._WITHOUT_TILES,
    "avx512-vnni": (*build._WITHOUT_TILES, "-mno-avx512bf16"),
    "avx512": (*build._WITHOUT_TILES, "-mno-avx512bf16", "-mno-avx512vnni"),
    "avx2-vnni": (*build._WITHOUT_TILES, "-mno-avx512f"),
    "avx2": (*build._WITHOUT_TILES, "-mno-avx512f", "-mno-avxvnni"),
}
"""By variant: what a processor for which it is lacks. Arm's need nothing: each has its own."""


SOFTCAP = {"softcap": 30.0, "scale": 0.1, "kv_dtype": torch.int8}
EVERY_KERNEL = [
    lambda: test_variants.test_linears(),
    lambda: test_variants.test_weights_of_8_and_4_bits(),
    lambda: test_variants.test_attention(torch.bfloat16),
    lambda: test_variants.test_what_is_between_linears(),
    lambda: test_variants.test_layers_with_state(),
    lambda: test_variants.test_sampling(),
    lambda: test_paged_attention.check_prompts_and_chunks(
        AttentionSpec(8, 1, 256, torch.bfloat16, CPU, 64, **SOFTCAP)
    ),
    lambda: test_paged_attention.test_store_is_float64s(4, 2, 80, 9, "wide"),
    lambda: test_ops.test_a_linear_of_each_head(3, 5, 40, 40, True),
    lambda: test_ops.test_gather_returns_the_rows(70, 33),
    lambda: test_ops.test_batch_is_what_the_tables_hold(3, False),
    lambda: test_ops.test_rules_on_logits(77),
    lambda: test_ops.test_sample_draws_what_torch_draws(1003, "top_p"),
    lambda: test_int_weights.test_rounding_in_c_is_that_of_torch(8, 64, True),
    lambda: test_layer_ops.test_layer_norm(77, "c"),
    lambda: test_layer_ops.test_copy_pages(64),
    lambda: test_experts.test_route(32, 4, False),
    lambda: test_experts.test_route_by_scores(32, 4, None, True, False, False),
    lambda: test_experts.test_a_wide_linear(64, 250),
    lambda: test_lora_ops.test_a_tokens_bits_do_not_depend_on_the_others(),
    lambda: test_state.test_norms_with_a_gate_are_those_of_transformers(77, "c"),
    lambda: test_state.test_tokens_from_the_log_are_torchs(),
    lambda: ops.ngram(torch.arange(9).int()[None] % 3, [(0, 5, 3, torch.zeros(17).int())], (2, 2)),
]
"""Calls of each kernel. Where products and sums may be rounded once, those with SOFTCAP differ."""


def runnable() -> list[str]:
    flags = build.processor_flags().union([SLOW_BF16] if build._choice_of_tiles() else [])
    return [name for name, variant in KNOWN.items() if flags.issuperset(variant.needs)]


def outputs_of(kernels, monkeypatch) -> list[tuple[str, list[torch.Tensor]]]:
    """Call every kernel; return what is in the tensors of each call afterwards, NaN as one NaN."""
    calls = []
    run = library_module.call

    def call(name, *args):
        run(name, *args)
        # A linear's prepared inputs are bytes, with gaps that nobody reads.
        skipped = torch.uint8 if name == "nv_linear_int" else None
        tensors = [x for x in args if isinstance(x, torch.Tensor) and x.dtype != skipped]
        calls.append((name, [x.clone().nan_to_num(nan=7) for x in tensors]))

    with monkeypatch.context() as patch:
        patch.setattr(library_module, "library", lambda: kernels)
        patch.setattr(library_module, "call", call)
        patch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
        torch.use_deterministic_algorithms(True)
        try:
            for run_case in EVERY_KERNEL:
                torch.manual_seed(0)
                run_case()
        finally:
            torch.use_deterministic_algorithms(False)
    return calls


@pytest.mark.usefixtures("inference_mode")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.long] if number else [])
        for number, name in enumerate(runnable())
    ],
)
def test_they_compute_the_bits_of_kernels_compiled_here(name, monkeypatch):
    """Symptom: a product and a sum were rounded once by one compiler, and twice by another."""
    monkeypatch.setenv(build.VARIABLE, build.COMPILE)
    first = outputs_of(build.load(*KNOWN[name].compiler_flags), monkeypatch)
    flags = (build.NATIVE, *LACKS[name]) if LACKS.get(name) else ()
    second = outputs_of(build.load(*flags), monkeypatch)
    assert {name for name, _ in first} == set(KERNELS)
    for (kernel, ours), (other, theirs) in zip(first, second, strict=True):
        assert kernel == other
        assert all(map(torch.equal, ours, theirs)), kernel


# Which is opened


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Return a function that installs libraries, by variant. There is no compiler, and no cache."""
    content = built_library()
    monkeypatch.setattr(build, "LIBRARIES", tmp_path)
    monkeypatch.delenv(build.VARIABLE, raising=False)
    monkeypatch.setenv("CC", "/no/such/compiler")
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    library_module.library.cache_clear()

    def install(**libraries: bytes) -> None:
        for name, library in libraries.items():
            (tmp_path / f"cpu-{name.replace('_', '-')}.0123.so").write_bytes(library or content)

    yield install
    library_module.library.cache_clear()


@pytest.fixture
def zen4(monkeypatch):
    """A processor with AVX512-BF16 that multiplies it fast, and no AMX."""
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(build, "_choice_of_tiles", tuple)
    flags = frozenset(VARIANTS["x86_64"]["avx512-bf16"].needs)
    monkeypatch.setattr(build, "processor_flags", lambda: flags)


@pytest.mark.usefixtures("zen4")
def test_the_fastest_that_the_processor_runs_is_opened(installed):
    installed(avx2=b"", avx512=b"", avx512_bf16=b"", avx512_slow_bf16=b"", amx=b"")
    assert library_module.library_name() == "cpu-avx512-bf16.0123.so"
    assert "avx512-bf16" in library_module.description()


@pytest.mark.usefixtures("zen4")
def test_one_that_does_not_work_is_a_warning_and_another_is_opened(installed, tmp_path, caplog):
    refusing = "int nv_enable(void) { return 0; } int nv_run; int nv_instructions;"
    installed(avx512_bf16=compiled(tmp_path, refusing), avx512_vnni=b"no library", avx2=b"")
    with caplog.at_level(logging.WARNING):
        assert library_module.library_name() == "cpu-avx2.0123.so"
    (warning,) = (record.getMessage() for record in caplog.records)
    assert "cpu-avx512-vnni.0123.so are not used" in warning


@pytest.mark.usefixtures("zen4")
def test_without_one_for_the_processor_a_compiler_is_asked(installed):
    installed(amx=b"")
    with pytest.raises(build.Unavailable, match="'/no/such/compiler', which is no program here"):
        build.load()


@pytest.mark.usefixtures("zen4")
def test_the_variable_chooses(installed, monkeypatch):
    installed(avx2=b"", avx512_bf16=b"", amx=b"", avx512=b"no library")
    monkeypatch.setenv(build.VARIABLE, "avx2")
    assert build.load()._name.endswith("cpu-avx2.0123.so")
    for asked, reason in {
        "amx": r"lacks amx_bf16, amx_int8, amx_tile; unset it, or choose avx512-bf16 or avx512 or",
        "neon": "'neon', which is not installed; unset it, or choose .* or avx2 or compile",
        "avx512": "'avx512', which does not work here: .*; unset it",
    }.items():
        monkeypatch.setenv(build.VARIABLE, asked)
        with pytest.raises(ConfigError, match=reason):
            build.load()
    monkeypatch.setenv(build.VARIABLE, build.COMPILE)
    with pytest.raises(build.Unavailable, match="no program here"):
        build.load()


@pytest.mark.skipif(sys.platform != "linux", reason="the names are in /proc/cpuinfo")
def test_torch_and_the_system_agree_about_the_processor():
    """Their names differ in underscores, and for a few flags."""
    other = {"fma3": "fma", "bmi": "bmi1", "lzcnt": "abm", "dot": "asimddp"}
    listed = {*build.processor_field("flags", "Features").replace("_", "").split()}
    for flag in {flag for variant in KNOWN.values() for flag in variant.needs} - {SLOW_BF16}:
        is_listed = other.get(flag, flag).replace("_", "") in listed
        assert torch.cpu.get_capabilities()[flag] == is_listed, flag
