"""Which experts the tokens of a model with experts had, for trainers that replay the choice.

Without this folder nobody is told.
"""
