"""Building blocks of models. Each layer loads only its tensor-parallel part of the weights."""
