// What the host tiling hands to the kernels: plain structs, included by both sides and including neither.
// A kernel's tiling buffer is one of the structs below, followed by its table of work.
#pragma once
#include <cstdint>

namespace msf {

enum class DataType : int32_t { none, f32, f16, bf16, u8, i32, i64 };

// Strides of (batch, head, row) in elements; channels are contiguous. `offset` is where the tensor starts, for tensors
// packed into one.
struct TensorLayout {
  int64_t b, h, s, offset;
};

// A (batch, head, query, key) plane that broadcasts: a stride of 0 repeats. `k` is 0 or 1.
struct PlaneLayout {
  int64_t b, h, q;
  int32_t k;
  DataType dtype;
};

// Where guard.h keeps its findings and its copies of K and V, in bytes from the start of the workspace.
struct GuardSpace {
  int64_t flags, key, value, clean_key;
};

// What is computed, as opposed to how: the same for all kernels.
struct AttentionTiling {
  int64_t batch, heads, kv_heads, group;
  int64_t q_len, k_len;                                   // of every sequence, unless varlen
  int64_t stat_b, stat_h;                                 // strides of the row statistics: (B, N, Sq) or (N, T)
  int64_t k_stat_b, k_stat_h;                             // the same for rows of K and V
  int32_t guard;                                          // keys may be excluded: NaN and Inf in them must not show
  int32_t d, dv;                                          // multiples of 16
  int64_t left, right;                                    // -1: unlimited
  int32_t bottom_right, varlen, lengths_are_int64, bf16;  // lengths: cumulative, or those of caches
  float scale, softcap, fill, keep_scale;                 // keep_scale: 1 / (1 - dropout probability)
  int32_t has_fill, dropout;                              // dropout: 0 none, 1 Philox, 2 given as drop_mask
  uint32_t drop_threshold, seed_from_input;
  uint64_t seed, offset;
  TensorLayout q, k, v, out;
  PlaneLayout mask, bias, drop_mask;
  int64_t alibi_b;
  // K and V in caches, which hold k_len at most: of a sequence those keys count that it has, cache_seqlens and what
  // this call appends. In pages of `page_size` rows, if that is not 0, of which a sequence has `table_pitch` in the
  // block table; the cache has `pages` of them.
  int32_t cached, table_is_int64;
  int64_t new_len, page_size, pages, table_pitch;
  DataType sinks;  // of the sinks; none: no sinks
  int32_t alibi;
};

// Rows [row0, row0 + rows) of one sequence against its keys [key0, key1), for each of the heads in turn. Over caches
// only the kernel knows how many keys there are: part key0 of key1 parts of them (schedule.h, keys_of).
struct WorkItem {
  int32_t batch, row0, rows, key0, key1;
  int32_t slot;  // -1: all keys of these rows; else the partial result's place (one per head)
};

// Partial results of the same rows, to be merged in order: slots [slot, slot + parts).
struct MergeItem {
  int32_t batch, row0, rows, slot, parts;
};

struct ForwardTiling {
  AttentionTiling a;
  int32_t cores, depth;  // depth: how many stacks the cube runs ahead of the vectors; rings hold depth + 1
  int32_t block_m, stack_n, block_n, pack;  // pack: heads that share one tile of rows (decode)
  int32_t l0_k;                             // depth of one product P V
  int32_t kv_slots, p_slots;                // buffers in L1
  int64_t items, heads_per_item, merges;
  // bytes, from the start of UB
  struct {
    int32_t tile, input, prob, acc, scratch, plane, row_max, row_sum, alpha, spread, stats, index, end;
  } ub;
  struct {
    int32_t q, kv, p, end;
  } l1;
  // bytes, from the start of the workspace; one ring per core
  struct {
    int64_t score, prob, partial_out, slots, slot_bytes, end;
    GuardSpace guard;
  } ws;
};

// Keys [key0, key1) of one sequence and KV head against all queries that see them.
struct BackwardItem {
  int32_t batch, kv_head, key0, key1;
  int32_t part;  // which dQ accumulator takes what these keys contribute
};

// The gradient of the bias: rows [row0, row1) x keys [key0, key1) of one of its slices, summed over the batches and
// heads that see this slice.
struct BiasItem {
  int32_t batch0, batch1, head0, head1, row0, row1, key0, key1;
};

// For the gradients of query, key, value and sinks, and for that of the bias.
struct BackwardTiling {
  AttentionTiling a;
  TensorLayout dout, dq, dk, dv;
  int32_t cores, depth, block_q, block_k, has_dlse;
  int32_t whole_rows;        // a pair holds all keys of its queries
  int32_t clean_dout;        // there may be queries that see no key, whose dO must not show
  int64_t items, parts;      // parts: dQ accumulators; with atomic accumulation one serves all
  int64_t q_stats, k_stats;  // rows of Q, and of K, over all batches and heads
  // numbers that the bias holds; accumulators, one for each vector core of a block where both may add to the same
  // number
  int64_t bias_elements, bias_parts, bias_part_elements;
  struct {
    int32_t tile, score, grad, prob, dscore, scratch, plane, slope, stats, spread, index, end;
  } ub;
  struct {
    int32_t rows, channels, stream, slot, end;
  } l1;
  struct {
    int64_t score, grad, prob, dscore, delta, dout, dq, dq_part, dk, dv, dbias, end;
    GuardSpace guard;
  } ws;
};

// y (rows x out) = x (rows x in) W^T + b; offsets and pitch in elements.
struct ProjectionTiling {
  int64_t rows, in, out, x_offset, w_offset, w_pitch, b_offset;
  int32_t transposed;  // W is stored (in, out)
};

// Projections of query, key and value, attention, and the projection of the output, in one launch. What lies between
// them stays in the workspace.
struct BlockTiling {
  ProjectionTiling q, k, v, o;
  int32_t has_output;  // without the last projection the attention's output is the result
  struct {
    int64_t q, k, v, out, end;
  } ws;
  ForwardTiling f;  // last: its tables follow
};

// Attention over caches, to which the launch appends first.
struct DecodeTiling {
  TensorLayout new_k, new_v;
  ForwardTiling f;  // last: its tables follow
};

// Attention over all keys from attentions over parts of them: part p is p * part_elements after `outs`, its LSEs are
// p * part_rows after the first.
struct MergeTiling {
  int64_t parts, batch, heads, rows, part_elements, part_rows;
  TensorLayout outs, out;
  int32_t dv, bf16, cores, chunk;  // chunk: rows of a tile
};

// CANN makes a tiling buffer as large as the struct that the kernel registers: one of the above, and room for its
// table. 32 KB are 1365 blocks of rows, 170,000 queries with 128 in a block.
constexpr int64_t kTableBytes = 32 * 1024;
struct ForwardTilingBuffer {
  ForwardTiling head;
  uint8_t table[kTableBytes];
};
struct BackwardTilingBuffer {
  BackwardTiling head;
  uint8_t table[kTableBytes];
};
struct DecodeTilingBuffer {
  DecodeTiling head;
  uint8_t table[kTableBytes];
};
struct BlockTilingBuffer {
  BlockTiling head;
  uint8_t table[kTableBytes];
};

}  // namespace msf
