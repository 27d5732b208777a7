"""Hidden checks of lab 1. They see values only: `remote.call` runs the student's code in the student's process."""

from grading.blackbox import Remote, hidden_check, require

LAB = "lab1_paged_attention"


@hidden_check(LAB, "kv_bytes_per_token")
def unseen_shapes(remote: Remote) -> None:
    def kv_bytes(layers: int, kv_heads: int, head_dim: int, size: int) -> int:
        from labkit.models import ModelShape

        return kv_bytes_per_token(ModelShape("unseen", layers, 4 * kv_heads, kv_heads, head_dim, layers), size)  # noqa: F821

    for layers, kv_heads, head_dim, size in ((17, 3, 96, 2), (1, 1, 64, 4), (61, 11, 256, 1)):
        got = remote.call(kv_bytes, layers, kv_heads, head_dim, size)
        require(got == 2 * layers * kv_heads * head_dim * size, f"wrong for {layers} layers of {kv_heads} KV heads")
