"""Self-attention as a module: projections around :func:`flash_wmma.forward`."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from . import _autocast, _checks
from ._call import Causal, call_of
from ._dropout import probability
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
        dropout: probability with which an attention weight is dropped in training, as for :func:`flash_wmma.forward`.
        sinks: whether each head of the queries has an attention sink, ``self.sinks`` (num_heads,), at first 0.
        device, dtype: of the parameters.

    Raises:
        TypeError, ValueError: an argument is of a wrong type, the numbers do not divide each other, or there is no such
            kernel. Whether a kernel can run x is known when it is called.
    """

    sinks: nn.Parameter | None

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        causal: Causal = False,
        bias: bool = True,
        dropout: float = 0.0,
        sinks: bool = False,
        kernel: str = "auto",
        backward_kernel: str = "auto",
        deterministic: bool | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        shared = num_heads if num_kv_heads is None else num_kv_heads
        _checks.count(embed_dim=embed_dim, num_heads=num_heads, num_kv_heads=shared)
        if embed_dim % num_heads != 0:
            refuse("num_heads", num_heads, f"a divisor of embed_dim, {embed_dim}")
        if num_heads % shared != 0:
            refuse("num_kv_heads", num_kv_heads, f"a divisor of num_heads, {num_heads}")
        call_of(causal, deterministic=deterministic)  # which checks them
        _checks.kernel(kernel)
        _checks.backward_kernel(backward_kernel)
        _checks.flag(bias=bias, sinks=sinks)
        probability(dropout=dropout)
        if dtype is not None and dtype not in _checks.MATH_DTYPES:
            error = ValueError if isinstance(dtype, torch.dtype) else TypeError
            refuse("dtype", repr(dtype), ", ".join(map(str, _checks.MATH_DTYPES)), error)
        self.heads = (num_heads, shared, shared)
        self.embed_dim, self.head_dim = embed_dim, embed_dim // num_heads
        self.causal: Causal = causal
        self.dropout = dropout
        self.kernel, self.backward_kernel, self.deterministic = kernel, backward_kernel, deterministic
        self.qkv = nn.Linear(embed_dim, sum(self.heads) * self.head_dim, bias=bias, device=device, dtype=dtype)
        self.out = nn.Linear(embed_dim, embed_dim, bias=bias, device=device, dtype=dtype)
        logits = nn.Parameter(torch.zeros(num_heads, device=device, dtype=dtype)) if sinks else None
        self.register_parameter("sinks", logits)

    def forward(self, x: Tensor) -> Tensor:
        """x (B, N, embed_dim), attended to and projected: (B, N, embed_dim).

        Args:
            x: of the parameters' dtype, unless ``torch.autocast`` is on, and on their device.

        Raises:
            TypeError, ValueError: x, or as :func:`flash_wmma.forward`.
        """
        _checks.tensors(x=x)
        if x.dim() != 3 or x.shape[2] != self.embed_dim:
            refuse("x.shape", tuple(x.shape), f"(B, N, embed_dim) with embed_dim = {self.embed_dim}")
        if type(self.qkv) is nn.Linear:  # others, such as quantised ones, may take what their weights are not
            weight = self.qkv.weight
            if x.device != weight.device:
                refuse("x.device", x.device, f"the parameters', {weight.device}")
            if x.dtype != weight.dtype and not _autocast.enabled(x.device):
                refuse("x.dtype", x.dtype, f"the parameters', {weight.dtype}")
        heads = self.qkv(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        q, k, v = heads.split(self.heads, dim=1)
        attended = forward(
            q,
            k,
            v,
            causal=self.causal,
            sinks=self.sinks,
            dropout_p=self.dropout if self.training else 0.0,
            kernel=self.kernel,
            backward_kernel=self.backward_kernel,
            deterministic=self.deterministic,
        )
        projected: Tensor = self.out(attended.transpose(1, 2).flatten(2))
        return projected
