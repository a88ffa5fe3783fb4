"""What tests, notebooks and trials need: a reading task that is generated, and tiny models that were trained on it."""

from kvx.testing.reading import READING, Passage, passages, questions_of

__all__ = ["READING", "Passage", "passages", "questions_of"]
