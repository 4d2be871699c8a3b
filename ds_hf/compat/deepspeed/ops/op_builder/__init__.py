"""``deepspeed.ops.op_builder``: which of DeepSpeed's compiled operations are here."""

from ds_hf.deepspeed_api.op_builder import BUILDERS, OpBuilder

from . import all_ops, builder

__all__ = [
    "AsyncIOBuilder",
    "CCLCommBuilder",
    "CPUAdagradBuilder",
    "CPUAdamBuilder",
    "CPULionBuilder",
    "DeepCompileBuilder",
    "EvoformerAttnBuilder",
    "FPQuantizerBuilder",
    "FusedAdamBuilder",
    "FusedLambBuilder",
    "FusedLionBuilder",
    "GDSBuilder",
    "InferenceBuilder",
    "InferenceCoreBuilder",
    "InferenceCutlassBuilder",
    "OpBuilder",
    "PinMemoryBuilder",
    "QuantizerBuilder",
    "RaggedOpsBuilder",
    "RaggedUtilsBuilder",
    "RandomLTDBuilder",
    "ShareMemCommBuilder",
    "SparseAttnBuilder",
    "SpatialInferenceBuilder",
    "StochasticTransformerBuilder",
    "TransformerBuilder",
    "UtilsBuilder",
    "all_ops",
    "builder",
]

AsyncIOBuilder = BUILDERS["AsyncIOBuilder"]
CCLCommBuilder = BUILDERS["CCLCommBuilder"]
CPUAdagradBuilder = BUILDERS["CPUAdagradBuilder"]
CPUAdamBuilder = BUILDERS["CPUAdamBuilder"]
CPULionBuilder = BUILDERS["CPULionBuilder"]
DeepCompileBuilder = BUILDERS["DeepCompileBuilder"]
EvoformerAttnBuilder = BUILDERS["EvoformerAttnBuilder"]
FPQuantizerBuilder = BUILDERS["FPQuantizerBuilder"]
FusedAdamBuilder = BUILDERS["FusedAdamBuilder"]
FusedLambBuilder = BUILDERS["FusedLambBuilder"]
FusedLionBuilder = BUILDERS["FusedLionBuilder"]
GDSBuilder = BUILDERS["GDSBuilder"]
InferenceBuilder = BUILDERS["InferenceBuilder"]
InferenceCoreBuilder = BUILDERS["InferenceCoreBuilder"]
InferenceCutlassBuilder = BUILDERS["InferenceCutlassBuilder"]
PinMemoryBuilder = BUILDERS["PinMemoryBuilder"]
QuantizerBuilder = BUILDERS["QuantizerBuilder"]
RaggedOpsBuilder = BUILDERS["RaggedOpsBuilder"]
RaggedUtilsBuilder = BUILDERS["RaggedUtilsBuilder"]
RandomLTDBuilder = BUILDERS["RandomLTDBuilder"]
ShareMemCommBuilder = BUILDERS["ShareMemCommBuilder"]
SparseAttnBuilder = BUILDERS["SparseAttnBuilder"]
SpatialInferenceBuilder = BUILDERS["SpatialInferenceBuilder"]
StochasticTransformerBuilder = BUILDERS["StochasticTransformerBuilder"]
TransformerBuilder = BUILDERS["TransformerBuilder"]
UtilsBuilder = BUILDERS["UtilsBuilder"]
