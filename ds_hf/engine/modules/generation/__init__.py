"""Generation on an engine: whole weights for as long as it takes, LoRA merged, training left as it was.

``attach`` gives an engine its ``Generation``, through which ``engine.generate`` and ``model.generate`` go.
"""

from __future__ import annotations

from ds_hf.engine.modules.generation.session import Generation, attach, generation_of

__all__ = ["Generation", "attach", "generation_of"]
