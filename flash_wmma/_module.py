"""Self-attention as a module: projections around :func:`flash_wmma.forward`."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ._call import Causal
from ._errors import refuse
from ._forward import forward


class MultiheadAttention(nn.Module):
    """Self-attention of x (B, N, embed_dim): one projection to q, k and v, the heads' attention, one projection back.

    Args:
        embed_dim: a multiple of ``num_heads``; each head has embed_dim / num_heads columns.
        num_heads: of the queries.
        num_kv_heads: of the keys and values, a divisor of ``num_heads``, which is the default.
        causal, kernel, backward_kernel, deterministic: as for :func:`flash_wmma.forward`.
        bias: whether the projections add one.
        device, dtype: of the parameters.

    Raises:
        ValueError: the numbers do not divide each other.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        causal: Causal = False,
        bias: bool = True,
        kernel: str = "auto",
        backward_kernel: str = "auto",
        deterministic: bool | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if num_heads < 1 or embed_dim % num_heads != 0:
            refuse("num_heads", num_heads, f"a divisor of embed_dim, {embed_dim}")
        shared = num_heads if num_kv_heads is None else num_kv_heads
        if shared < 1 or num_heads % shared != 0:
            refuse("num_kv_heads", num_kv_heads, f"a divisor of num_heads, {num_heads}")
        self.heads = (num_heads, shared, shared)
        self.head_dim = embed_dim // num_heads
        self.causal: Causal = causal
        self.kernel, self.backward_kernel, self.deterministic = kernel, backward_kernel, deterministic
        self.qkv = nn.Linear(embed_dim, sum(self.heads) * self.head_dim, bias=bias, device=device, dtype=dtype)
        self.out = nn.Linear(embed_dim, embed_dim, bias=bias, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """(B, N, embed_dim), attended to and projected."""
        heads = self.qkv(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        q, k, v = heads.split(self.heads, dim=1)
        attended = forward(
            q,
            k,
            v,
            causal=self.causal,
            kernel=self.kernel,
            backward_kernel=self.backward_kernel,
            deterministic=self.deterministic,
        )
        projected: Tensor = self.out(attended.transpose(1, 2).flatten(2))
        return projected
