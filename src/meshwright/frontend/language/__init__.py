"""The `.mw` language: grammar, axis checker and builder."""

from meshwright.frontend.language.build import initial_value, initialize
from meshwright.frontend.language.load import LoadedFile, load, load_text

__all__ = ["LoadedFile", "initial_value", "initialize", "load", "load_text"]
