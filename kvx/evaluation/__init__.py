"""Evaluation: all arms on the same items, figures with intervals, attention outputs, latency, verdict."""
