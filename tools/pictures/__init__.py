"""The pictures in docs/pictures. `python -m tools.pictures` redraws them."""
