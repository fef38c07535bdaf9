"""Bridle trains language agents by reinforcement learning through their own, unmodified harness.

Every agent must call a model; Bridle stands at that call. A harness changes its model base URL and
its key, nothing else. The gateway answers in four providers' wire formats, keeps the exact tokens
that were sampled, and the trajectory builders turn them into training sequences.

This package imports nothing: each room loads when it is asked for.
"""

__all__ = ["__version__"]

__version__ = "0.1.0"
