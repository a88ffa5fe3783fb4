"""What tests, notebooks and trials need: a reading task that is generated, and the training of tiny models on it."""

from kvx.testing.reading import READING, Passage, passages, questions_of

__all__ = ["READING", "Passage", "passages", "questions_of"]
