"""Predictors of one figure over equal intervals, by their names."""

from collections.abc import Callable
from functools import partial

from planner.core.predict.base import Constant, Predictor
from planner.core.predict.ensemble import Ensemble
from planner.core.predict.kalman import Kalman
from planner.core.predict.smoothing import Holt, Seasonal

__all__ = [
    "EXPERTS",
    "PREDICTORS",
    "Constant",
    "Ensemble",
    "Holt",
    "Kalman",
    "Predictor",
    "Seasonal",
]

EXPERTS: tuple[type[Predictor], ...] = (Constant, Holt, Kalman, Seasonal)
"""Those that run in the shadow of the ensemble; the first is the one to be beaten."""
PREDICTORS: dict[str, Callable[..., Predictor]] = {
    "constant": Constant,
    "kalman": Kalman,
    "holt": Holt,
    "seasonal": Seasonal,
    "ensemble": partial(Ensemble, EXPERTS),
}
