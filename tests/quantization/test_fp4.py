"""Linears in FP4: exact numbers, by parts and ranks. "Wide" is compressed-tensors' own float32."""

import pytest
import torch
from safetensors.torch import save_file

from nanovllm.errors import ConfigError, UnsupportedModelError
from nanovllm.features.quantization.fp4 import MXFP4, NVFP4, QuantizedFp4, powers_of_two, unpack_fp4
from nanovllm.features.quantization.weight_formats import store_as
from nanovllm.kernels.cpu.kernels import CKernels
from nanovllm.kernels.cpu.library import library
from nanovllm.kernels.torch_kernels import TORCH
from nanovllm.layers.linear import QKVParallelLinear, RowParallelLinear
from nanovllm.layers.pieces import SmallLinear, TensorRows
from nanovllm.loading.loader import load_weights
from tests.kernels.cpu.helpers import make_int_method
from tests.quantization.float_checkpoints import compress, scheme_of

LAYOUTS = {"NVFP4": NVFP4, "MXFP4": MXFP4}
NUMBERS = [0, 0.5, 1, 1.5, 2, 3, 4, 6]


class Fp4:
    """All linears of a model in FP4."""

    def __init__(self, layout):
        self.name, self.layout = layout.name, layout

    def quantized(self, matrix, names):
        return QuantizedFp4(self.layout, matrix)


def write(path, shapes, preset):
    """Save random linears in FP4; return their wide weights by name."""
    generator = torch.Generator().manual_seed(0)
    tensors, wide = {}, {}
    for name, shape in shapes.items():
        weight = torch.randn(shape, generator=generator) * 4 ** len(wide)
        stored, wide[name] = compress(weight, scheme_of(preset))
        tensors |= {f"{name}.{end}": tensor for end, tensor in stored.items()}
    save_file(tensors, path)
    return wide


def load(module, path, preset, dtype=torch.float32):
    """Load `module` from the file at `path`; return its weight."""
    model = torch.nn.ModuleDict({"attn": torch.nn.ModuleDict({"proj": module})})
    store_as(model, Fp4(LAYOUTS[preset]))
    load_weights(model, [path], progress=False)
    method = module.quantized.method(dtype, TORCH)
    return method.embedding(torch.arange(module.output_size))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("preset", LAYOUTS)
@pytest.mark.parametrize("size", [1, 2])
def test_every_part_has_its_own_scales(preset, size, dtype, as_rank, tmp_path):
    shapes = {"attn.q_proj": (64, 96), "attn.k_proj": (16, 96), "attn.v_proj": (16, 96)}
    wide = write(tmp_path / "model.safetensors", shapes, preset)
    for rank in range(size):
        as_rank(rank, size)
        layer = QKVParallelLinear(96, 8, 2, 8, bias=False)
        loaded = load(layer, tmp_path / "model.safetensors", preset, dtype)
        expected = torch.cat([weight.chunk(size)[rank] for weight in wide.values()])
        assert layer.quantized.description.startswith(
            f"in {preset}: {'widened to float32' if dtype == torch.float32 else 'kept in 4 bits'}"
        )
        assert torch.allclose(loaded.float(), expected, rtol=1e-6 if dtype.itemsize > 2 else 1e-3)


@pytest.mark.parametrize("preset", LAYOUTS)
def test_inputs_are_split_with_their_groups(preset, as_rank, tmp_path):
    wide = write(tmp_path / "model.safetensors", {"attn.proj": (20, 128)}, preset)["attn.proj"]
    for rank in range(2):
        as_rank(rank, 2)
        layer = RowParallelLinear(128, 20, bias=False)
        loaded = load(layer, tmp_path / "model.safetensors", preset)
        assert torch.allclose(loaded, wide.chunk(2, 1)[rank], rtol=1e-6)


def test_ranks_do_not_cut_groups(as_rank):
    as_rank(1, 2)
    model = torch.nn.ModuleDict({"proj": RowParallelLinear(96, 8, bias=False)})
    store_as(model, Fp4(NVFP4))
    rule = r"tensor_parallel_size 2 cuts proj\.weight \(8, 96\) within a group of 32 inputs"
    with pytest.raises(ConfigError, match=rule):
        store_as(torch.nn.ModuleDict({"proj": RowParallelLinear(96, 8, bias=False)}), Fp4(MXFP4))


def test_inputs_of_no_whole_groups_are_refused():
    model = torch.nn.ModuleDict({"proj": RowParallelLinear(40, 8, bias=False)})
    with pytest.raises(UnsupportedModelError, match="proj: NVFP4 has scales of 16 .* 40 inputs"):
        store_as(model, Fp4(NVFP4))


def test_gates_are_widened(tmp_path):
    """Rounded inputs would open or close them."""
    wide = write(tmp_path / "model.safetensors", {"attn.proj": (8, 64)}, "NVFP4")["attn.proj"]
    layer = SmallLinear(64, [TensorRows("proj", 8, 5, 3), TensorRows("proj", 8, 0, 2)])
    loaded = load(layer, tmp_path / "model.safetensors", "NVFP4", torch.bfloat16)
    assert torch.allclose(loaded.float(), torch.cat([wide[5:], wide[:2]]), rtol=2**-8)
    assert (
        "widened to bfloat16 because small linears keep their bits" in layer.quantized.description
    )


def test_all_numbers():
    """Each pair of 4 bits with each scale of MXFP4, and with each finite one of NVFP4."""
    pairs = torch.arange(256, dtype=torch.uint8).repeat_interleave(8).view(-1, 16)
    table = torch.tensor([*NUMBERS, *(-number for number in NUMBERS)], dtype=torch.float64)
    rows = pairs.unsqueeze(-1).int()
    numbers = torch.cat([table[rows & 15], table[rows >> 4]], -1).flatten(1)
    e4m3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    e4m3 = e4m3[e4m3.float().isfinite()]
    for scale in (*e4m3, *torch.arange(255, dtype=torch.uint8)):
        group = 32 if scale.dtype == torch.uint8 else 16
        scales = scale.expand(len(pairs), 32 // group).contiguous()
        weight = unpack_fp4(pairs, scales)
        loaded = make_int_method(weight, torch.float32, TORCH).embedding(torch.arange(len(pairs)))
        exact = 2.0 ** (int(scale) - 127) if group == 32 else float(scale)
        assert torch.equal(loaded.double(), (numbers * exact).float().double())
    assert powers_of_two(torch.tensor([255], dtype=torch.uint8)).isnan().all()


@pytest.mark.skipif(library() is None, reason="no compiler here")
@pytest.mark.parametrize("preset", LAYOUTS)
@pytest.mark.parametrize(("n", "k"), [(7, 32), (130, 96), (64, 2048)])
def test_products_in_c(preset, n, k):
    """Inputs are rounded to 8 bits, in groups of 32: an error of 0.5%. Weights are exact."""
    torch.manual_seed(n)
    stored, wide = compress(torch.randn(n, k) / k**0.5, scheme_of(preset))
    factor = stored.get("weight_global_scale")
    factors = None if factor is None else (1 / factor).expand(n)
    weight = unpack_fp4(stored["weight_packed"], stored["weight_scale"], factors)
    method = make_int_method(weight, torch.bfloat16, CKernels())
    assert torch.allclose(method.embedding(torch.arange(n)).float(), wide, rtol=2**-7)
    x = torch.randn(16, k).bfloat16()
    found, expected = method.apply(x).float(), x.float() @ wide.T
    assert (found - expected).norm() < 0.01 * expected.norm()
