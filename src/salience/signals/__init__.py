"""Signals: per-sample statistics that need the model."""

from salience.signals.attached import Attached

__all__ = ["Attached"]
