"""Select: which samples, how often, with what weight? Filter, score, normalise, sample, weigh."""

from salience.select.pipeline import Pipeline
from salience.select.presets import PRESETS, preset
from salience.select.view import Candidates, Clock, Draw, Verdict, View

__all__ = ["PRESETS", "Candidates", "Clock", "Draw", "Pipeline", "Verdict", "View", "preset"]
