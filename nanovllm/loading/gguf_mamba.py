"""Models with Mamba-2 in a GGUF file: names, settings, and what llama.cpp's converter has changed.

What reading undoes, apart from names: ssm_a is -exp(A_log), and ssm_dt's bias is dt_bias; ssm_a,
ssm_d and ssm_norm have two dimensions, the weight of the convolution lacks one of 1.

Falcon-H1's factors are in the weights: those of a file are all 1.

Reads metadata, no weight. Imports no torch.
"""

from nanovllm.loading.gguf_family import Fields, GgufFamily, Reading
from nanovllm.loading.gguf_header import Metadata

SIZES = {
    "ssm.conv_kernel": "mamba_d_conv",
    "ssm.state_size": "mamba_d_state",
    "ssm.group_count": "mamba_n_groups",
    "ssm.time_step_rank": "mamba_n_heads",
}
READINGS = {
    "ssm_conv1d": Reading(axis=1),
    "ssm_a": Reading(is_decay=True, is_flat=True),
    "ssm_d": Reading(is_flat=True),
    "ssm_norm": Reading(is_flat=True),
}


def mamba_modules(parent: str) -> dict[str, str]:
    """Return the modules of a Mamba-2 layer at `parent`, by llama.cpp's name."""
    names = {"in": "in_proj", "conv1d": "conv1d", "norm": "norm", "out": "out_proj"}
    return {f"ssm_{name}": f"{parent}.{module}" for name, module in names.items()}


def mamba_tensors(parent: str) -> dict[str, str]:
    """Return its tensors that are of no module, by llama.cpp's name."""
    names = {"a": "A_log", "d": "D", "dt.bias": "dt_bias"}
    return {f"ssm_{name}": f"{parent}.{tensor}" for name, tensor in names.items()}


def mamba_fields(metadata: Metadata, config: Fields) -> Fields:
    """Return the fields of Mamba-2 beyond `SIZES`."""
    width = metadata.size("ssm.inner_size")
    heads = config["mamba_n_heads"]
    if width % heads:
        raise metadata.unsupported("ssm.time_step_rank", heads, f"a divisor of {width} channels")
    has_bias = {
        name: any(tensor.endswith(f".{name}.bias") for tensor in metadata.tensors)
        for name in ("ssm_conv1d", "ssm_in", "ssm_out")
    }
    return {
        "mamba_d_head": width // heads,
        "mamba_conv_bias": has_bias["ssm_conv1d"],
        "mamba_proj_bias": has_bias["ssm_in"],
        "projectors_bias": has_bias["ssm_out"],
        "mamba_d_ssm": width,
    }


def _falcon_fields(metadata: Metadata, config: Fields) -> Fields:
    return {
        **mamba_fields(metadata, config),
        "mamba_rms_norm": any(name.endswith(".ssm_norm.weight") for name in metadata.tensors),
        "mamba_norm_before_gate": False,
    }


FALCON_H1 = GgufFamily(
    "FalconH1ForCausalLM",
    modules={
        **mamba_modules("mamba"),
        "ffn_norm": "pre_ff_layernorm",
        "ffn_gate": "feed_forward.gate_proj",
        "ffn_up": "feed_forward.up_proj",
        "ffn_down": "feed_forward.down_proj",
    },
    tensors={
        **mamba_tensors("mamba"),
        "output_norm.weight": "model.final_layernorm.weight",
        "ffn_norm": "pre_ff_layernorm.weight",  # as the converter names it
    },
    sizes=SIZES,
    fields=_falcon_fields,
    readings=lambda config: READINGS,
)
