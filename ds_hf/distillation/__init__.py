"""Knowledge distillation: a student learns a teacher's logits, hidden states and attention, with engines or without.

``distill`` makes the loss that a student of transformers gives while it trains the distilled one, in place, before
``initialize``; so an ordinary loop, the Trainer or whatever reads ``outputs.loss`` trains it, at every stage. The
losses by themselves, for a loop of one's own, are ``logits_loss``, ``hidden_loss`` and ``attention_loss``. Design:
docs/design/compression.md.

Sources: Hinton et al., arXiv:1503.02531 (temperature, its square); DistilBERT, arXiv:1910.01108; TinyBERT,
arXiv:1909.10351 (hidden states by a projection, attention); GKD, arXiv:2306.13649 (divergence by ``beta``).
"""

from __future__ import annotations

from ds_hf.distillation.losses import attention_loss, hidden_loss, logits_loss
from ds_hf.distillation.recipe import Recipe, spread
from ds_hf.distillation.student import Distilled, distill
from ds_hf.distillation.teacher import teacher_engine

__all__ = ["Distilled", "Recipe", "attention_loss", "distill", "hidden_loss", "logits_loss", "spread", "teacher_engine"]
