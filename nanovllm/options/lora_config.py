"""Checks of the options of LoRA adapters, which `Config` has. Reads no file."""

from nanovllm.errors import ConfigError

MAX_LORAS = 1024
MAX_LORA_RANK = 512
DEFAULT_LORAS, DEFAULT_LORA_RANK = 1, 16


def check_lora(*, enable_lora: bool, max_loras: int, max_lora_rank: int, lora: str | None) -> None:
    """Check the options of LoRA against each other.

    Raises:
        ConfigError: one contradicts another.
    """
    if lora is not None and enable_lora:
        raise ConfigError(
            "lora merges one adapter into the weights, and with enable_lora=True each request may "
            "name its own: leave one of both out"
        )
    if enable_lora:
        return
    for name, value, default in (
        ("max_loras", max_loras, DEFAULT_LORAS),
        ("max_lora_rank", max_lora_rank, DEFAULT_LORA_RANK),
    ):
        if value != default:
            raise ConfigError(
                f"{name} {value} is for adapters that requests name, but enable_lora is False: "
                f"give enable_lora=True too, or leave {name} out"
            )
