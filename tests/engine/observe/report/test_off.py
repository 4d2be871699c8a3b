"""Without ``ds_hf.report`` nothing of it exists. This file imports nothing of it either."""

from __future__ import annotations

import sys

from ds_hf import Engine, initialize
from tests.helpers.distributed import run_distributed
from tests.helpers.models import TinyLM, token_batches
from tests.helpers.parity import base_config


def nothing_without_the_key() -> None:
    engine: Engine = initialize(model=TinyLM(depth=3), config=base_config(3))[0]
    engine.backward(engine(token_batches(1, 16)))
    engine.step()
    assert not any(name.startswith("ds_hf.engine.observe.report") for name in sys.modules)
    assert engine.axis.log.observer is None
    assert not engine.events.watched
    assert not engine.events.observers
    engine.destroy()


def test_without_the_key_nothing_of_it_exists() -> None:
    run_distributed(nothing_without_the_key, 1)
