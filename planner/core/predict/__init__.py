"""Predictors of one figure over equal intervals, by their names."""

from planner.core.predict.base import Constant, Predictor
from planner.core.predict.ensemble import Ensemble
from planner.core.predict.kalman import Kalman
from planner.core.predict.smoothing import Holt, Seasonal

__all__ = ["PREDICTORS", "Constant", "Ensemble", "Holt", "Kalman", "Predictor", "Seasonal"]

PREDICTORS: dict[str, type[Predictor]] = {
    "constant": Constant,
    "kalman": Kalman,
    "holt": Holt,
    "seasonal": Seasonal,
    "ensemble": Ensemble,
}
