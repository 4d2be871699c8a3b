"""Predicts what training takes of device, host and disk, without a GPU: ``predict``, ``Predictor``.

How it works is in docs/design/tools.md.
"""

from ds_hf.memory.prediction import Prediction, UnpredictableError, Workload
from ds_hf.memory.predictor import Predictor, largest_micro_batch, predict

__all__ = ["Prediction", "Predictor", "UnpredictableError", "Workload", "largest_micro_batch", "predict"]
