"""Generation on an engine: whole weights for as long as it takes, LoRA merged, training left as it was.

An engine makes its ``Generation``, through which ``engine.generate`` and ``model.generate`` go, when it is first asked
for; ``attach`` lets a model that generates find it.
"""

from __future__ import annotations

from ds_hf.engine.modules.generation.session import Generation, attach, generation_for, generation_of

__all__ = ["Generation", "attach", "generation_for", "generation_of"]
