"""Which of the operations that DeepSpeed compiles are here: the question scripts ask of its builders.

ds_hf compiles nothing when it is imported or asked. ``load()`` of an operation that is here gives the module that
holds it; of one that is not, an error that names it.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any, ClassVar

from ds_hf.engine.ops.cpu import FOLDER
from ds_hf.errors import DsHfError

__all__ = ["BUILDERS", "OpBuilder", "compatible_ops"]


@dataclass(frozen=True)
class Op:
    """One operation: class name of DeepSpeed's builder, its own name, our module (None: not here), what it needs."""

    builder: str
    name: str
    home: str | None = None
    library: str | None = None

    @property
    def here(self) -> bool:
        """The module is part of ds_hf, and its library was built."""
        return self.home is not None and (self.library is None or (FOLDER / self.library).exists())


OPS = (
    Op("AsyncIOBuilder", "async_io", "ds_hf.engine.offload.handle", "libds_hf_aio.so"),
    Op("CCLCommBuilder", "deepspeed_ccl_comm"),
    Op("CPUAdagradBuilder", "cpu_adagrad", "ds_hf.engine.optim.adagrad"),
    Op("CPUAdamBuilder", "cpu_adam", "ds_hf.engine.optim.adam"),
    Op("CPULionBuilder", "cpu_lion", "ds_hf.engine.optim.lion"),
    Op("DeepCompileBuilder", "dc"),
    Op("EvoformerAttnBuilder", "evoformer_attn"),
    Op("FPQuantizerBuilder", "fp_quantizer"),
    Op("FusedAdamBuilder", "fused_adam", "ds_hf.engine.optim.adam"),
    Op("FusedLambBuilder", "fused_lamb", "ds_hf.engine.optim.lamb"),
    Op("FusedLionBuilder", "fused_lion", "ds_hf.engine.optim.lion"),
    Op("GDSBuilder", "gds"),
    Op("InferenceBuilder", "transformer_inference"),
    Op("InferenceCoreBuilder", "inference_core_ops"),
    Op("InferenceCutlassBuilder", "cutlass_ops"),
    Op("PinMemoryBuilder", "pin_memory"),
    Op("QuantizerBuilder", "quantizer"),
    Op("RaggedOpsBuilder", "ragged_device_ops"),
    Op("RaggedUtilsBuilder", "ragged_ops"),
    Op("RandomLTDBuilder", "random_ltd"),
    Op("ShareMemCommBuilder", "deepspeed_shm_comm"),
    Op("SparseAttnBuilder", "sparse_attn"),
    Op("SpatialInferenceBuilder", "spatial_inference"),
    Op("StochasticTransformerBuilder", "stochastic_transformer"),
    Op("TransformerBuilder", "transformer"),
    Op("UtilsBuilder", "utils", "torch._utils"),
)


class OpBuilder:
    """Base of the builders, whose subclasses differ in ``op`` alone."""

    op: ClassVar[Op]
    NAME: ClassVar[str] = ""
    BUILD_VAR: ClassVar[str] = ""

    def __init__(self, name: str | None = None) -> None:
        self.name = name or self.NAME

    def absolute_name(self) -> str:
        """The operation's full name."""
        return f"deepspeed.ops.{self.NAME}_op"

    def is_compatible(self, verbose: bool = False) -> bool:
        """Whether the operation is here."""
        return self.op.here

    def load(self, verbose: bool = False) -> Any:
        """The module that holds the operation.

        Raises:
            DsHfError: it is not here.
        """
        if self.op.home is None:
            raise DsHfError(f"the operation {self.NAME} of DeepSpeed is not in ds_hf: is_compatible() says so as well")
        return importlib.import_module(self.op.home)


BUILDERS: dict[str, type[OpBuilder]] = {
    op.builder: type(op.builder, (OpBuilder,), {"op": op, "NAME": op.name, "BUILD_VAR": f"DS_BUILD_{op.name.upper()}"})
    for op in OPS
}


def compatible_ops() -> dict[str, bool]:
    """Name of each operation, and whether it is here."""
    return {op.name: op.here for op in OPS}
