"""Faults in what a key/value cache needs: where its rows lie, grouped heads, the conversion, appending."""

from mutations.fault import Fault

ROWS = "csrc/cached_rows.h"
TILE = "csrc/device/grouped_tile.cuh"
COPIES = "csrc/device/copy_map.cuh"
CONVERT = "csrc/device/convert.cu"
KERNEL = "csrc/forward/mma/kernel.cuh"
BLOCK = "csrc/forward/mma/block.cuh"
RING = "csrc/forward/mma/key_value_ring.cuh"
FROM_GLOBAL = "csrc/forward/mma/copies.cuh"
PROBLEMS = "csrc/problems.h"
TASKS = "csrc/cpu/tasks.h"
ATTENTION = "csrc/cpu/attention.cpp"
ALGORITHM = "csrc/cpu/attention.inl"
ARGUMENTS = "csrc/torch/arguments.cpp"
APPEND = "flash_wmma/_append.py"
CACHED = "flash_wmma/_cached.py"
FLASH_ATTN = "flash_wmma/_flash_attn.py"
CHECKS = "flash_wmma/_checks.py"
CACHE = ("kvcache",)
MMA = ("mma_sm75",)
"""The kernel that compiles faster, of the two that share the code."""

FAULTS = [
    # ---- where the rows lie, on the CPU and in kernels
    Fault(
        name="pages-not-clamped",
        path=ROWS,
        old="(pages ? clamp(pages[run], num_pages - 1) : page)",
        new="(pages ? pages[run] : page)",
        why="a page number out of range reads outside the cache",
        tests=CACHE,
    ),
    Fault(
        name="row-of-a-page",
        path=ROWS,
        old="(row - run * page_size) * rows.row",
        new="(j - run * page_size) * rows.row",
        why="with a leftpad the rows of a page are off",
        tests=CACHE,
    ),
    Fault(
        name="leftpad-counts-as-keys",
        path=ROWS,
        old="clamp(s.seqused_k[sequence], static_cast<int>(capacity)) - first",
        new="clamp(s.seqused_k[sequence], static_cast<int>(capacity))",
        why="a sequence with a leftpad sees so many rows too many",
        tests=CACHE,
    ),
    Fault(
        name="lengths-not-clamped",
        path=ROWS,
        old="count(clamp(clamp(s.seqused_k[sequence], static_cast<int>(capacity)) - first,",
        new="count(clamp(s.seqused_k[sequence] - first,",
        why="with a leftpad, lengths beyond the capacity read entries behind the table",
        tests=CACHE,
    ),
    Fault(
        name="two-pages-as-one",
        path=ROWS,
        old="first / page_size == (first + count - 1) / page_size",
        new="first / page_size == (first + count - 1) / page_size - 1",
        why="two pages are read as if they lay side by side",
        tests=CACHE,
    ),
    Fault(
        name="cache-unconverted",
        path=PROBLEMS,
        old="if (s.page_size && !converted)",
        new="if (s.page_size)",
        why="a converted problem, whose cache is gone, asks for an instance for caches",
        kernels=MMA,
        tests=CACHE,
    ),
    # ---- the CPU
    Fault(
        name="leftpad-of-the-first",
        path=TASKS,
        old="one.sequences.leftpad = s.leftpad + b;",
        new="one.sequences.leftpad = s.leftpad;",
        why="sequences in pages begin where the first one does",
        tests=CACHE,
    ),
    Fault(
        name="lse-of-the-first-entry",
        path=TASKS,
        old="        p.lse += b * p.lse_batch;\n",
        new="",
        why="all sequences write the first one's lse",
        tests=CACHE,
    ),
    Fault(
        name="cache-without-keys-unwritten",
        path=ATTENTION,
        old="if (idle) clear_rows(one, 0, one.seqlen_q);",
        new="if (false && idle) clear_rows(one, 0, one.seqlen_q);",
        why="dense queries of an empty cache are not written",
        tests=CACHE,
    ),
    Fault(
        name="pages-in-place",
        path=ALGORITHM,
        old="p.dtype != DType::kFloat32 || p.sequences.page_size;",
        new="p.dtype != DType::kFloat32;",
        why="float32 pages are read as if they lay side by side",
        tests=CACHE,
    ),
    # ---- grouped heads
    Fault(
        name="group-by-query",
        path=TILE,
        old="return {static_cast<int>(at / heads), head_k * group + static_cast<int>(at % heads)};",
        new="return {static_cast<int>(at / heads), head_k * group};",
        why="all rows of a group are its first head's",
        kernels=MMA,
        tests=CACHE,
    ),
    Fault(
        name="group-of-another-head",
        path=TILE,
        old="head_k * group + static_cast<int>(at % heads)",
        new="head_k + static_cast<int>(at % heads)",
        why="later groups compute the first one's heads",
        kernels=MMA,
        tests=CACHE,
    ),
    Fault(
        name="packed-tiles-of-one-head",
        path=TILE,
        old="packed_tiles(s.total_q * group, p.batch, Br)",
        new="packed_tiles(s.total_q, p.batch, Br)",
        why="blocks of packed queries take other tiles than the grid counts",
        kernels=MMA,
        tests=CACHE,
    ),
    Fault(
        name="rows-behind-see-keys",
        path=TILE,
        old="if (!behind) found.seqlen_k =",
        new="found.seqlen_k =",
        why="the rows behind the last sequence attend to its keys",
        kernels=MMA,
        tests=CACHE,
    ),
    Fault(
        name="dense-tiles-of-one-head",
        path=TILE,
        old="(p.seqlen_q * group + Br - 1) / Br);",
        new="(p.seqlen_q + Br - 1) / Br);",
        why="blocks take other tiles than the grid counts",
        kernels=MMA,
        tests=CACHE,
    ),
    Fault(
        name="last-query-by-rows",
        path=BLOCK,
        old="min(tile.row(Tile::kBr - 1).query + 1, sequence.seqlen_q) - 1;",
        new="min(tile.row(Tile::kBr - 1).query, sequence.seqlen_q) - 1;",
        why="the last query of a tile lacks its last tile of keys",
        kernels=MMA,
        tests=("kvcache", "forward"),
    ),
    Fault(
        name="one-head-modifies",
        path=KERNEL,
        old=".head = row.head, .head_k = 0",
        new=".head = 0, .head_k = 0",
        why="every head has the first one's bias and slope",
        kernels=MMA,
        tests=CACHE,
    ),
    Fault(
        name="queries-behind-copied",
        path=FROM_GLOBAL,
        old="const bool copies = inside && column < work.p.head_dim;",
        new="const bool copies = column < work.p.head_dim;",
        why="rows of Q behind the sequence are read",
        kernels=MMA,
        tests=CACHE,
    ),
    # ---- copies from pages
    Fault(
        name="unused-rows-looked-up",
        path=COPIES,
        old="(key + row < cached.count ? cached.offset(tensor, key + row) : 0)",
        new="cached.offset(tensor, key + row)",
        why="the table is read behind its end",
        kernels=MMA,
        tests=CACHE,
    ),
    Fault(
        name="pages-do-not-move",
        path=COPIES,
        old="        key -= Rows;\n",
        new="",
        why="every tile has the last one's keys",
        kernels=MMA,
        tests=CACHE,
    ),
    Fault(
        name="values-by-the-keys-rows",
        path=RING,
        old="v(head(work, work.p.v) + work.first_column(), rows, work.p.v, key,",
        new="v(head(work, work.p.v) + work.first_column(), rows, work.p.k, key,",
        why="V's rows are looked for at K's distances",
        kernels=MMA,
        tests=CACHE,
    ),
    # ---- the conversion
    Fault(
        name="gathered-to-the-capacity",
        path=CONVERT,
        old="        end = keys;\n",
        new="        end = t.rows;\n",
        why="rows that are not in use take part in a tile's scale",
        kernels=MMA,
        tests=CACHE,
    ),
    Fault(
        name="gathered-counts-missing",
        path=CONVERT,
        old="converted.sequences.seqused_k = k.keys;",
        new="converted.sequences.seqused_k = p.sequences.seqused_k;",
        why="the kernel counts a leftpad's rows as keys",
        kernels=MMA,
        tests=CACHE,
    ),
    # ---- the host
    Fault(
        name="capacity-of-a-page",
        path=ARGUMENTS,
        old="p.seqlen_k = pages > 0 ? runs * page_size : 0;",
        new="p.seqlen_k = pages > 0 ? page_size : 0;",
        why="keys behind the first page are not seen",
        tests=CACHE,
    ),
    Fault(
        name="table-rows-adjacent",
        path=ARGUMENTS,
        old="s.page_table_stride = page_table_->stride(0);",
        new="s.page_table_stride = page_table_->size(1);",
        why="a table that is part of a wider one is read as contiguous",
        tests=CACHE,
    ),
    # ---- appending
    Fault(
        name="append-behind-the-capacity",
        path=APPEND,
        old="valid = (at >= 0) & (at < held) & (sequence < batch)",
        new="valid = (at >= 0) & (sequence < batch)",
        why="rows behind the capacity are written over the last row",
    ),
    Fault(
        name="append-of-no-sequence",
        path=APPEND,
        old="(at < held) & (sequence < batch)",
        new="(at < held)",
        why="packed rows behind the last sequence are written",
    ),
    Fault(
        name="append-to-a-clamped-page",
        path=APPEND,
        old="    valid = valid & (page >= 0) & (page < pages)\n",
        new="",
        why="a page number out of range writes to another sequence's page",
    ),
    Fault(
        name="append-first-of-none",
        path=APPEND,
        old="torch.where(some, new[source], cache[page, :, row])",
        new="new[source]",
        why="if no row has a place, one is written nevertheless",
    ),
    Fault(
        name="rotation-backwards",
        path=APPEND,
        old="turned = torch.stack((a * c - b * s, a * s + b * c), dim=-1).flatten(-2)",
        new="turned = torch.stack((a * c + b * s, b * c - a * s), dim=-1).flatten(-2)",
        why="interleaved pairs turn the other way",
    ),
    Fault(
        name="halves-interleaved",
        path=APPEND,
        old="a, b = turned[..., :half], turned[..., half:]",
        new="a, b = turned[..., 0::2], turned[..., 1::2]",
        why="rotary_interleaved=False pairs neighbours",
    ),
    Fault(
        name="queries-rotate-alike",
        path=FLASH_ATTN,
        old="advance = causal or window is not None",
        new="advance = causal",
        why="with a window, all queries are rotated by the first one's row",
        tests=CACHE,
    ),
    Fault(
        name="new-keys-unseen",
        path=FLASH_ATTN,
        old="seqlens = seqlens + (n if cu_seqlens_k_new is None else _differences(cu_seqlens_k_new))",
        new="seqlens = seqlens + (0 if cu_seqlens_k_new is None else _differences(cu_seqlens_k_new))",
        why="queries do not see the keys that were appended",
        tests=CACHE,
    ),
    Fault(
        name="rotary-places-of-the-cache",
        path=FLASH_ATTN,
        old="start = seqlens if rotary_seqlens is None else rotary_seqlens",
        new="start = seqlens",
        why="rotary_seqlens is ignored",
        tests=CACHE,
    ),
    Fault(
        name="entries-as-lengths",
        path=CACHED,
        old="return cache_batch_idx.to(torch.int32).unsqueeze(1)",
        new="return None",
        why="cache_batch_idx is ignored",
    ),
    Fault(
        name="validate-unused-pages",
        path=CHECKS,
        old="range(begin // rows, (end - 1) // rows + 1)",
        new="range(begin // rows, end // rows + 1)",
        why="validate=True refuses what is not in use",
        tests=CACHE,
    ),
]
