"""The measuring side of the autotuner inside an engine: told by a file what to measure, it answers in another.

``driver`` decides what happens when, ``replay`` runs steps of other batch sizes on the script's own batch, ``batches``
resizes it, ``memory`` finds peaks and keeps an artificial limit, ``clock`` times, ``survey`` finds what the cost model
needs, ``split`` where the time goes; ``probes.snapshot`` brings the state back. Nothing here exists for an engine that
is not part of a trial.
"""

from ds_hf.engine.observe.probes.trial.driver import attach

__all__ = ["attach"]
