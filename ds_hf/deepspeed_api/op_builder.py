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
class BuilderOp:
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
    BuilderOp("AsyncIOBuilder", "async_io", "ds_hf.engine.offload.handle", "libds_hf_aio.so"),
    BuilderOp("CCLCommBuilder", "deepspeed_ccl_comm"),
    BuilderOp("CPUAdagradBuilder", "cpu_adagrad", "ds_hf.engine.optim.adagrad"),
    BuilderOp("CPUAdamBuilder", "cpu_adam", "ds_hf.engine.optim.adam"),
    BuilderOp("CPULionBuilder", "cpu_lion", "ds_hf.engine.optim.lion"),
    BuilderOp("DeepCompileBuilder", "dc"),
    BuilderOp("EvoformerAttnBuilder", "evoformer_attn"),
    BuilderOp("FPQuantizerBuilder", "fp_quantizer"),
    BuilderOp("FusedAdamBuilder", "fused_adam", "ds_hf.engine.optim.adam"),
    BuilderOp("FusedLambBuilder", "fused_lamb", "ds_hf.engine.optim.lamb"),
    BuilderOp("FusedLionBuilder", "fused_lion", "ds_hf.engine.optim.lion"),
    BuilderOp("GDSBuilder", "gds"),
    BuilderOp("InferenceBuilder", "transformer_inference"),
    BuilderOp("InferenceCoreBuilder", "inference_core_ops"),
    BuilderOp("InferenceCutlassBuilder", "cutlass_ops"),
    BuilderOp("PinMemoryBuilder", "pin_memory"),
    BuilderOp("QuantizerBuilder", "quantizer"),
    BuilderOp("RaggedOpsBuilder", "ragged_device_ops"),
    BuilderOp("RaggedUtilsBuilder", "ragged_ops"),
    BuilderOp("RandomLTDBuilder", "random_ltd"),
    BuilderOp("ShareMemCommBuilder", "deepspeed_shm_comm"),
    BuilderOp("SparseAttnBuilder", "sparse_attn"),
    BuilderOp("SpatialInferenceBuilder", "spatial_inference"),
    BuilderOp("StochasticTransformerBuilder", "stochastic_transformer"),
    BuilderOp("TransformerBuilder", "transformer"),
    BuilderOp("UtilsBuilder", "utils", "torch._utils"),
)


class OpBuilder:
    """Base of the builders, whose subclasses differ in ``op`` alone."""

    op: ClassVar[BuilderOp]
    NAME: ClassVar[str] = ""
    BUILD_VAR: ClassVar[str] = ""

    def __init__(self, name: str | None = None) -> None:
        self.name = name or self.NAME

    def absolute_name(self) -> str:
        """The operation's full name."""
        return f"deepspeed.ops.{self.NAME}_op"

    @staticmethod
    def installed_rocm_version() -> tuple[int, int]:
        """(0, 0): ds_hf runs on CUDA and on CPUs."""
        return 0, 0

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
