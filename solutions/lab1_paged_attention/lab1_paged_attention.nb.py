# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # Lab 1: PagedAttention

# %% readonly="setup"
import labkit
from labkit.models import ModelShape

# %% [markdown]
# ## 1. What one token costs


# %% question="kv_bytes_per_token" points=1 hidden=1
def kv_bytes_per_token(shape: ModelShape, dtype_bytes: int = 2) -> int:
    """Bytes of KV cache that one token takes.

    shape: the model. dtype_bytes: bytes of one stored value (2 for fp16 and bf16).
    """
    ### BEGIN SOLUTION
    return 2 * shape.attention_layers * shape.num_kv_heads * shape.head_dim * dtype_bytes
    ### END SOLUTION
