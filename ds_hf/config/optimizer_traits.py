"""What ds_hf has to know of an optimizer before it runs: one table for the engine, for offload and for predictions.

==========  ==================================================================================================
column      meaning
==========  ==================================================================================================
moments     tensors of state that are as large as the parameters, as a rule: SGD without momentum, Muon's matrices
at most     the same, whatever the options and the parameters: what offload keeps room for
elementwise an element's update depends on that element's own gradient and state, so parameters may be cut anywhere
streamed    ds_hf updates unit after unit, without a copy of all gradients
==========  ==================================================================================================

An optimizer that is not in the table is taken for one with two moments that looks at whole parameters and makes its own
``step()``.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["ONE_BIT", "TRAITS", "Traits", "most_moments", "traits_of"]


class Traits(NamedTuple):
    """One row; the columns are above."""

    moments: int = 2
    at_most: int = 2
    elementwise: bool = False
    streamed: bool = False

    @property
    def by_element(self) -> bool:
        """Shards are updated unit after unit: masters may be split, and states in host memory may go over the GPU."""
        return self.elementwise and self.streamed


_ADAM = Traits(elementwise=True, streamed=True)
_ONE = Traits(1, 1, elementwise=True, streamed=True)

TRAITS = {
    # ds_hf's own rules, by the names of DeepSpeed's classes too; Adam, AdamW, Adagrad and SGD of torch are stepped by
    # the same operators
    "Adam": _ADAM,
    "AdamW": _ADAM,
    "FusedAdam": _ADAM,
    "CPUAdam": _ADAM,
    "Lion": _ONE,
    "FusedLion": _ONE,
    "CPULion": _ONE,
    "Adagrad": _ONE,
    "CPUAdagrad": _ONE,
    "SGD": Traits(0, 1, elementwise=True, streamed=True),
    "Lamb": Traits(streamed=True),
    "FusedLamb": Traits(streamed=True),
    "Muon": Traits(1, 2, streamed=True),
    "OnebitAdam": Traits(3, 3, streamed=True),  # with what each process owes
    "ZeroOneAdam": Traits(4, 4, streamed=True),
    "OnebitLamb": Traits(4, 4, streamed=True),
    # other classes of torch.optim
    "RMSprop": Traits(1, 1, elementwise=True),
    "Adafactor": Traits(0, 2),  # a row and a column of each matrix
    "Adamax": Traits(elementwise=True),
    "NAdam": Traits(elementwise=True),
    "RAdam": Traits(elementwise=True),
    "Rprop": Traits(elementwise=True),
    "Adadelta": Traits(elementwise=True),
    "ASGD": Traits(elementwise=True),
}
ONE_BIT = ("onebitadam", "zerooneadam", "onebitlamb")  # as configurations call them, in lower case
_BY_TYPE = {name.lower(): traits for name, traits in TRAITS.items()}
_UNKNOWN = Traits()


def traits_of(kind: str) -> Traits:
    """Of the optimizer that a configuration calls ``kind``, in any case."""
    return _BY_TYPE.get(kind.lower(), _UNKNOWN)


def most_moments(class_name: str) -> int:
    """Moments at most of a class, also of another library's: ``Lion8bit`` is a Lion."""
    return min((traits.at_most for name, traits in TRAITS.items() if name in class_name), default=_UNKNOWN.at_most)
