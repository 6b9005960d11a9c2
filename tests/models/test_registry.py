"""The registry, and the page that is made of it."""

import pytest

from nanovllm.errors import UnsupportedModelError
from nanovllm.models.registry import read_config
from tests.models.family_configs import config_of
from tools import models


def test_page_of_models_is_current() -> None:
    assert models.page() == models.PAGE.read_text("utf-8"), "run python -m tools.models"


def test_ling_3_has_the_name_of_its_own_code_in_the_published_file() -> None:
    config = {**config_of("BailingHybridForCausalLM"), "architectures": ["BailingMoeV3ForCausalLM"]}
    found = read_config({**config, "model_type": "bailing_hybrid"})
    assert found.architecture == "BailingHybridForCausalLM"
    with pytest.raises(UnsupportedModelError, match="BailingMoeV3ForCausalLM"):
        read_config({**config, "model_type": "bailing_moe"})
