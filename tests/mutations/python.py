"""Faults of the public Python functions."""

from __future__ import annotations

from .fault import Fault

FLASH_ATTN = "flash_wmma/_flash_attn.py"
FORWARD = "flash_wmma/_forward.py"
AUTOGRAD = "flash_wmma/_autograd.py"
OPS = "flash_wmma/_ops.py"
FAKE = "flash_wmma/_fake.py"
AUTOCAST = "flash_wmma/_autocast.py"
CHECKS = "flash_wmma/_checks.py"
SDPA = "flash_wmma/_sdpa.py"
MATH = "flash_wmma/_math.py"
MODULE = "flash_wmma/_module.py"
EXPLAIN = "flash_wmma/_explain.py"
HOOK = "flash_wmma/_hook.py"
PROFILE = "flash_wmma/_profile.py"
PROFILER = "flash_wmma/_profiler.py"
OPS = "flash_wmma/_ops.py"
CALL = "flash_wmma/_call.py"
RANKS = "flash_wmma/_ranks.py"

QKVPACKED = """    q, k, v = _unpacked("qkv", qkv, 2, 3, "(B, N, 3, H, d)")
    return flash_attn_func(
        q,
        k,
        v,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
"""
KVPACKED = """    k, v = _unpacked("kv", kv, 2, 2, "(B, N, 2, H, d)")
    return flash_attn_func(
        q,
        k,
        v,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
"""
VARLEN_QKVPACKED = """        cu_seqlens,
        cu_seqlens,
        max_seqlen,
        max_seqlen,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
"""
VARLEN_KVPACKED = """    k, v = _unpacked("kv", kv, 1, 2, "(total_k, 2, H, d)")
    return flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
"""

FAULTS = [
    # ---- flash-attn's functions
    Fault(
        name="qkvpacked-without-softcap",
        path=FLASH_ATTN,
        old=QKVPACKED,
        new=QKVPACKED.replace("        softcap,\n", "        0.0,\n"),
        why="flash_attn_qkvpacked_func drops softcap",
    ),
    Fault(
        name="kvpacked-without-window",
        path=FLASH_ATTN,
        old=KVPACKED,
        new=KVPACKED.replace("        window_size,\n", "        (-1, -1),\n"),
        why="flash_attn_kvpacked_func drops window_size",
    ),
    Fault(
        name="varlen-qkvpacked-without-slopes",
        path=FLASH_ATTN,
        old=VARLEN_QKVPACKED,
        new=VARLEN_QKVPACKED.replace("        alibi_slopes,\n", "        None,\n"),
        why="flash_attn_varlen_qkvpacked_func drops alibi_slopes",
    ),
    Fault(
        name="varlen-kvpacked-not-deterministic",
        path=FLASH_ATTN,
        old=VARLEN_KVPACKED,
        new=VARLEN_KVPACKED.replace("        deterministic,\n", "        False,\n"),
        why="flash_attn_varlen_kvpacked_func drops deterministic",
    ),
    Fault(
        name="varlen-window-from-the-first-key",
        path=FLASH_ATTN,
        old="""        bottom_right=True,
        lengths=""",
        new="        lengths=",
        why="the varlen stand-in aligns a window without causal to the first key",
    ),
    Fault(
        name="one-open-bound-opens-both",
        path=FLASH_ATTN,
        old="isinstance(right, int) and left < 0 and right < 0:",
        new="isinstance(right, int) and (left < 0 or right < 0):",
        why="window_size (-1, 4) is taken for no window",
    ),
    Fault(
        name="lse-transposed",
        path=FLASH_ATTN,
        old="    return _result(out.transpose(1, 2), lse, return_attn_probs)",
        new="    return _result(out.transpose(1, 2), lse.transpose(1, 2), return_attn_probs)",
        why="flash_attn_func's lse is (B, Nq, Hq)",
    ),
    # ---- forward and forward_varlen
    Fault(
        name="scale-alone-is-lost",
        path=CALL,
        old="        if only_band and scale is None and deterministic is None",
        new="        if only_band and deterministic is None",
        why="a scale without a mask is taken for the default",
    ),
    Fault(
        name="batch-invariant-alone-is-lost",
        path=CALL,
        old="""            and kernel == backward_kernel == "auto"
            and not batch_invariant
""",
        new="""            and kernel == backward_kernel == "auto"
""",
        why="batch_invariant without another option does not reach the op",
    ),
    Fault(
        name="varlen-not-batch-invariant",
        path=FORWARD,
        old="""        batch_invariant,
        backward_kernel,
        deterministic,
        key_ranges,
        sinks,
        dropout_p,
        rng_state,
        lengths=""",
        new="""        False,
        backward_kernel,
        deterministic,
        key_ranges,
        sinks,
        dropout_p,
        rng_state,
        lengths=""",
        why="forward_varlen drops batch_invariant",
    ),
    Fault(
        name="causal-keeps-the-right-bound",
        path=CALL,
        old="0 if causal else -1 if right is None else right, bottom_right",
        new="-1 if right is None and not causal else right or 0, bottom_right",
        why="causal with a window (left, 3) sees three keys ahead",
    ),
    Fault(
        name="top-left-at-the-bottom",
        path=CALL,
        old='"top_left": False, "bottom_right": True}',
        new='"top_left": True, "bottom_right": True}',
        why='causal="top_left" is aligned to the last key',
    ),
    Fault(
        name="seqused-lost-in-forward",
        path=FORWARD,
        old="Lengths(cu_seqlens_q, cu_seqlens_k, seqused_k, max_seqlen_q",
        new="Lengths(cu_seqlens_q, cu_seqlens_k, None, max_seqlen_q",
        why="forward_varlen without gradients sees the keys that are not in use",
    ),
    Fault(
        name="forward-not-deterministic",
        path=FORWARD,
        old="""        deterministic,
        key_ranges,
        sinks,
        dropout_p,
        rng_state,
    )""",
        new="""        None,
        key_ranges,
        sinks,
        dropout_p,
        rng_state,
    )""",
        why="forward drops deterministic",
    ),
    Fault(
        name="varlen-not-deterministic",
        path=FORWARD,
        old="""        deterministic,
        key_ranges,
        sinks,
        dropout_p,
        rng_state,
        lengths=""",
        new="""        None,
        key_ranges,
        sinks,
        dropout_p,
        rng_state,
        lengths=""",
        why="forward_varlen drops deterministic",
    ),
    Fault(
        name="math-window-from-the-first-key",
        path=MATH,
        old="*call.band, q.device",
        new="*call.band[:2], False, q.device",
        why='kernel="math" ignores bottom_right',
    ),
    # ---- gradients
    Fault(
        name="backward-takes-any-kernel",
        path=OPS,
        old="""        call.backward_kernel,
""",
        new="""        "auto",
""",
        why="backward_kernel is checked and then dropped",
    ),
    Fault(
        name="backward-without-softcap",
        path=OPS,
        old="""        call.softcap,
        call.sinks,""",
        new="""        0.0,
        call.sinks,""",
        why="the gradients are those without softcap",
    ),
    Fault(
        name="flag-over-argument",
        path=OPS,
        old="return torch.are_deterministic_algorithms_enabled() if asked is None else asked",
        new="return torch.are_deterministic_algorithms_enabled() or bool(asked)",
        why="torch's flag holds against deterministic=False",
    ),
    Fault(
        name="lse-without-gradient",
        path=AUTOGRAD,
        old="arguments = dout, dlse, q, k, v, out, lse, bias_grad,",
        new="arguments = dout, None, q, k, v, out, lse, bias_grad,",
        why="the gradient of lse is dropped",
    ),
    Fault(
        name="seqused-lost-in-backward",
        path=OPS,
        old="lengths.cu_seqlens_k, lengths.seqused_k)",
        new="lengths.cu_seqlens_k, None)",
        why="backward_varlen sees the keys that are not in use",
    ),
    Fault(
        name="gradients-not-cast",
        path=AUTOGRAD,
        old="    if torch._C._is_any_autocast_enabled():\n",
        new="    if False:\n",
        why="under autocast backward is given float32 beside forward's float16",
    ),
    Fault(
        name="one-tensor-thrice",
        path=AUTOGRAD,
        old="    v = v.view_as(v) if v is q or v is k else v\n",
        new="",
        why="torch.compile takes no tensor twice",
    ),
    Fault(
        name="warn-only-forgets-the-kernel",
        path=AUTOGRAD,
        old="call._replace(deterministic=False))",
        new='call._replace(deterministic=False, backward_kernel="auto"))',
        why="the second attempt under warn_only drops backward_kernel",
    ),
    # ---- fake kernels
    Fault(
        name="fake-layout",
        path=FAKE,
        old="q.new_empty(bnhd).transpose(1, 2) if out_bnhd else",
        new="q.new_empty((batch, heads, n, d_v)) if out_bnhd else",
        why="a compiled graph takes out_bnhd for the other layout",
    ),
    Fault(
        name="fake-lse-of-packed",
        path=FAKE,
        old="q.new_empty((heads, total), dtype=torch.float32)",
        new="q.new_empty((total, heads), dtype=torch.float32)",
        why="a compiled graph takes lse for (total, H)",
    ),
    Fault(
        name="fake-gradient-layout",
        path=FAKE,
        old="    if t.dim() == 4 and t.stride(1) < t.stride(2):\n",
        new="    if t.dim() == 4 and t.stride(1) > t.stride(2):\n",
        why="a compiled graph takes gradients for the other layout",
    ),
    Fault(
        name="fake-bias-gradient",
        path=FAKE,
        old="else attn_bias.new_empty(attn_bias.shape)",
        new="else q.new_empty(attn_bias.shape)",
        why="a compiled graph takes a float32 bias's gradient for q's dtype",
    ),
    # ---- autocast
    Fault(
        name="autocast-casts-every-bias",
        path=AUTOCAST,
        old="    return x.to(dtype) if isinstance(x, Tensor) and x.dtype in _HALF else x\n",
        new="    return x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x\n",
        why="a float32 bias and the slopes are rounded",
    ),
    Fault(
        name="autocast-without-varlen",
        path=AUTOCAST,
        old='for _name in ("forward", "forward_with_statistics", "forward_varlen"):',
        new='for _name in ("forward", "forward_with_statistics"):',
        why="packed sequences are not cast",
    ),
    # ---- checks
    Fault(
        name="validate-refuses-the-end",
        path=CHECKS,
        old="    if ends[-1] > total:\n",
        new="    if ends[-1] >= total:\n",
        why="validate=True refuses sequences that fill the tensor",
    ),
    Fault(
        name="broadcast-from-the-front",
        path=CHECKS,
        old="for n, m in zip(reversed(sizes), reversed(full), strict=False)):",
        new="for n, m in zip(sizes, full, strict=False)):",
        why="a bias of fewer dimensions is compared with the wrong ones",
    ),
    Fault(
        name="slopes-of-another-batch",
        path=CHECKS,
        old="and (len(sizes) == 1 or sizes[0] == batch)",
        new="",
        why="slopes of another batch go on to the op, whose words are worse",
    ),
    # ---- SDPA's stand-in
    Fault(
        name="sdpa-without-scale",
        path=SDPA,
        old="""        causal=bool(is_causal),
        scale=scale,
""",
        new="""        causal=bool(is_causal),
""",
        why="the stand-in drops scale",
    ),
    Fault(
        name="sdpa-mask-not-expanded",
        path=SDPA,
        old="        attn_mask = attn_mask.expand(*query.shape[:3], key.shape[2])\n",
        new="        pass\n",
        why="under deterministic algorithms a broadcast mask's gradient is refused by CUDA kernels",
    ),
    Fault(
        name="sdpa-value-head-dim",
        path=SDPA,
        old="if d < 1 or dv < 1 or d > largest or dv > largest:",
        new="if d < 1 or dv < 1 or d > largest:",
        why="values with too many columns are not left to torch",
    ),
    Fault(
        name="sdpa-forgets-dropout",
        path=SDPA,
        old="        dropout_p=dropout_p,\n    )\n    out = attend(",
        new="    )\n    out = attend(",
        why="the stand-in drops dropout_p",
    ),
    # ---- kernel="math"
    Fault(
        name="math-slopes-from-the-first-key",
        path=MATH,
        old="queries.stop, device=q.device)[:, None] + nk - nq\n",
        new="queries.stop, device=q.device)[:, None]\n",
        why="ALiBi is aligned to the first key",
    ),
    Fault(
        name="math-bias-of-the-first-sequence",
        path=MATH,
        old="            bias = bias[b : b + 1] if bias.dim() == 4",
        new="            bias = bias[:1] if bias.dim() == 4",
        why="every packed sequence has the first one's bias",
    ),
    Fault(
        name="math-uses-all-keys",
        path=MATH,
        old="keys.start + max(int(seqused_k[b]), 0), keys.stop)",
        new="keys.stop, keys.stop)",
        why="seqused_k is ignored",
    ),
    Fault(
        name="math-heads-interleaved",
        path=MATH,
        old="k.to(dtype).repeat_interleave(group, dim=1)",
        new="k.to(dtype).repeat(1, group, 1, 1)",
        why="grouped query heads read the wrong key head",
    ),
    # ---- MultiheadAttention
    Fault(
        name="module-not-causal",
        path=MODULE,
        old="            causal=self.causal,\n",
        new="",
        why="the module drops causal",
    ),
    Fault(
        name="module-not-deterministic",
        path=MODULE,
        old="            deterministic=self.deterministic,\n",
        new="",
        why="the module drops deterministic",
    ),
    Fault(
        name="module-takes-any-kernel",
        path=MODULE,
        old="            kernel=self.kernel,\n",
        new="",
        why="the module drops kernel",
    ),
    # ---- explain and profile
    Fault(
        name="explain-without-softcap",
        path=EXPLAIN,
        old="""        softcap=call.softcap,
        sinks=""",
        new="""        softcap=0.0,
        sinks=""",
        why="explain names a kernel that has no softcap",
    ),
    Fault(
        name="explain-not-batch-invariant",
        path=EXPLAIN,
        old="""        batch_invariant=call.batch_invariant,
    )""",
        new="""        batch_invariant=False,
    )""",
        why="explain says a tile that batch_invariant does not take",
    ),
    Fault(
        name="explain-of-every-gradient",
        path=EXPLAIN,
        old="    if attn_bias is None or not attn_bias.requires_grad:\n",
        new="    if attn_bias is None:\n",
        why="explain asks for a bias's gradient that nobody wants",
    ),
    Fault(
        name="explain-forgets-the-flag",
        path=EXPLAIN,
        old="        deterministic = torch.are_deterministic_algorithms_enabled()\n",
        new="        deterministic = False\n",
        why="explain ignores torch's flag",
    ),
    Fault(
        name="profile-without-causal",
        path=PROFILER,
        old="call_of(causal, scale,",
        new="call_of(False, scale,",
        why="profile drops causal",
    ),
    Fault(
        name="profile-without-softcap",
        path=PROFILER,
        old="alibi_slopes, softcap, kernel, key",
        new="alibi_slopes, 0.0, kernel, key",
        why="profile drops softcap",
    ),
    # ---- behind torch's own attention
    Fault(
        name="hook-without-slopes",
        path=HOOK,
        old="""            alibi_slopes=alibi_slopes,
            bottom_right=True,""",
        new="            bottom_right=True,",
        why="what stands for _flash_attention_forward drops alibi_slopes",
    ),
    Fault(
        name="hook-uses-all-keys",
        path=HOOK,
        old="Lengths(cum_seq_q, cum_seq_k, seqused_k, max_q",
        new="Lengths(cum_seq_q, cum_seq_k, None, max_q",
        why="what stands for _flash_attention_forward drops seqused_k",
    ),
    Fault(
        name="hook-right-bound",
        path=HOOK,
        old="""            window=(window_size_left, window_size_right),
            alibi_slopes""",
        new="""            window=(window_size_left, None),
            alibi_slopes""",
        why="torch's window_size_right is ignored",
    ),
    Fault(
        name="hook-without-scale",
        path=HOOK,
        old="call_of(causal=is_causal, scale=scale, attn_bias=attn_mask)",
        new="call_of(causal=is_causal, attn_bias=attn_mask)",
        why="the CPU's gradients behind torch's attention drop scale",
    ),
    Fault(
        name="hook-not-deterministic",
        path=HOOK,
        old="bias_grad=False, deterministic=torch.are_deterministic_algorithms_enabled()",
        new="bias_grad=False, deterministic=False",
        why="gradients behind torch's attention ignore torch's flag",
    ),
    # ------------------------------------------------------------------------------ shapes of torch's attention: _ranks
    Fault(
        name="ranks-grouped-keys-keep-their-heads",
        path=RANKS,
        old="return q[:-2], (*k[:-3], q[-3]), (*v[:-3], q[-3])",
        new="return q[:-2], k[:-2], v[:-2]",
        why="grouped heads are taken as dimensions that do not broadcast",
    ),
    Fault(
        name="ranks-mask-from-the-front",
        path=RANKS,
        old="zip(reversed(mask), reversed(full), strict=False)",
        new="zip(mask, full, strict=False)",
        why="a mask of fewer dimensions is compared with the first ones of the scores",
    ),
    Fault(
        name="ranks-heads-of-the-keys-alone",
        path=RANKS,
        old="of_keys = heads_of(k) if enable_gqa or heads_of(k) == heads_of(v) == 1 else heads",
        new="of_keys = heads_of(k)",
        why="keys of one head beside values of several",
    ),
    Fault(
        name="ranks-mask-repeats-along-its-first-dimension",
        path=RANKS,
        old="if all(n == 1 for n in mask.shape[:-3]):",
        new="if mask.shape[0] == 1:",
        why="a mask that differs along the second of its batch dimensions",
    ),
    Fault(
        name="ranks-broadcast-one-way",
        path=RANKS,
        old="if any(m != n and m != 1 and n != 1 for m, n in pairs):",
        new="if any(m != n and m != 1 for m, n in pairs):",
        why="queries do not broadcast over fewer keys",
    ),
]
