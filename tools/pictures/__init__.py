"""The pictures in docs/pictures. `python -m tools.pictures` draws them again."""
