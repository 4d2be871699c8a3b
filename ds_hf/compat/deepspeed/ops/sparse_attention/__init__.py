"""``deepspeed.ops.sparse_attention``."""

from ds_hf.engine.modules.sparse.layouts import (
    BigBirdSparsityConfig,
    BSLongformerSparsityConfig,
    DenseSparsityConfig,
    FixedSparsityConfig,
    LocalSlidingWindowSparsityConfig,
    SparsityConfig,
    VariableSparsityConfig,
)

from . import (
    bert_sparse_self_attention,
    matmul,
    softmax,
    sparse_attention_utils,
    sparse_self_attention,
    sparsity_config,
)
from .bert_sparse_self_attention import BertSparseSelfAttention
from .sparse_attention_utils import SparseAttentionUtils
from .sparse_self_attention import SparseSelfAttention

__all__ = [
    "BSLongformerSparsityConfig",
    "BertSparseSelfAttention",
    "BigBirdSparsityConfig",
    "DenseSparsityConfig",
    "FixedSparsityConfig",
    "LocalSlidingWindowSparsityConfig",
    "SparseAttentionUtils",
    "SparseSelfAttention",
    "SparsityConfig",
    "VariableSparsityConfig",
    "bert_sparse_self_attention",
    "matmul",
    "softmax",
    "sparse_attention_utils",
    "sparse_self_attention",
    "sparsity_config",
]
