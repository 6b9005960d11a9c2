"""Answers of /v1/models."""

from typing import Literal

from pydantic import BaseModel


class ModelCard(BaseModel):
    """A model that can be named in requests."""

    id: str
    object: Literal["model"] = "model"
    created: int
    """Unix time in seconds."""
    owned_by: str = "nanovllm"
    root: str
    """What was loaded."""
    parent: None = None
    max_model_len: int


class ModelList(BaseModel):
    """All models of the server."""

    object: Literal["list"] = "list"
    data: list[ModelCard]
