// FlashAttention for CUDA, forward and backward, written to be read: plain float arithmetic, no tensor cores, no
// atomics, every result the same from run to run. It says what a GPU kernel has to compute; triton_forward.py is the
// fast one.
//
// A block of 128 threads owns 32 queries (backward of K and V: 32 keys) and up to 128 channels of the result. It walks
// over tiles of 32 keys (queries). In a 32 x 32 tile of scores thread t has column t % 32 of the rows 8 * (t / 32) +
// 0..7; in a result, channels t % 32 + 32 * n of the same rows.
#include <cmath>

#include "gpu/device.h"
#include "gpu/flash_attention.h"
// after device.h, which says how to mark functions for the device
#include "common/band.h"
#include "common/philox.h"

namespace {

using msf::Band;

constexpr int kTile = 32;                       // queries and keys of a tile of scores
constexpr int kDepth = 32;                      // head_dim is walked through in steps of this
constexpr int kThreads = 128;                   // of a block
constexpr int kPer = kTile * kTile / kThreads;  // rows of a thread
constexpr int kWide = kTile * 4;                // channels of a block

using Scores = Tile<float, kTile, kTile>;
using Slice = Tile<float, kTile, kDepth>;  // 32 rows of Q, K, V or dO, some channels of them
using Wide = Tile<float, kTile, kWide>;    // the same, as many channels as a block has
using Column = Tile<float, kTile, 1>;      // a number per row

// One (batch, head), and what a block of it works on.
struct Head {
  int64_t b, h, kv;  // batch, query head, key head
  int64_t q0, k0;    // rows before it: in Q, out and the statistics; in K and V
  int64_t block;     // of queries or keys
  int channel0;      // of the result

  // blockIdx.x counts (batch, head, block), the block fastest; blockIdx.y the groups of channels
  __device__ Head(const MsFlashCudaCall& c, int64_t heads, int64_t blocks) {
    const int64_t x = blockIdx.x;
    block = x % blocks;
    b = x / blocks / heads;
    channel0 = int(blockIdx.y) * kWide;
    set(c, x / blocks % heads * (c.heads / heads));
  }

  // another query head of the same group
  __device__ void set(const MsFlashCudaCall& c, int64_t head) {
    h = head;
    kv = h / (c.heads / c.kv_heads);
    q0 = (b * c.heads + h) * c.q_len;
    k0 = (b * c.kv_heads + kv) * c.k_len;
  }
};

__device__ int row_of(int r) { return int(threadIdx.x) / kTile * kPer + r; }
__device__ int column() { return int(threadIdx.x) % kTile; }

__device__ Band band_of(const MsFlashCudaCall& c) {
  return Band(c.q_len, c.k_len, c.left, c.right, c.bottom_right != 0);
}

// Rows [row0, row0 + 32) and channels from channel0 of a (rows, channels) matrix; zeros outside of it.
template <class T, int kColumns>
__device__ void load(Tile<float, kTile, kColumns>* to, const void* from, int64_t row0, int64_t rows, int64_t channel0,
                     int64_t channels) {
  for (int e = int(threadIdx.x); e < kTile * kColumns; e += kThreads) {
    const int r = e / kColumns, c = e % kColumns;
    const bool inside = row0 + r < rows && channel0 + c < channels;
    to->put(r, c, inside ? to_float(read(static_cast<const T*>(from) + (row0 + r) * channels + channel0 + c)) : 0.0f);
  }
}

// s[r] = row row_of(r) of a, times row column() of b. Has a barrier before it first writes to what callers read.
template <class T>
__device__ void product(const void* a, int64_t a0, int64_t a_rows, const void* b, int64_t b0, int64_t b_rows,
                        int64_t channels, Slice* left, Slice* right, float (&s)[kPer]) {
  for (int r = 0; r < kPer; ++r) s[r] = 0;
  for (int64_t d = 0; d < channels; d += kDepth) {
    load<T>(left, a, a0, a_rows, d, channels);
    load<T>(right, b, b0, b_rows, d, channels);
    __syncthreads();
    for (int e = 0; e < kDepth; ++e)
      for (int r = 0; r < kPer; ++r) s[r] += (*left)(row_of(r), e) * (*right)(column(), e);
    __syncthreads();
  }
}

// sum[r][n] += row row_of(r) of weights, times column column() + 32 n of x. A weight of 0 counts for nothing, whatever
// x holds: a key that is masked out may be NaN.
__device__ void accumulate(const Scores& weights, const Wide& x, float (&sum)[kPer][4]) {
  for (int j = 0; j < kTile; ++j)
    for (int r = 0; r < kPer; ++r) {
      const float weight = weights(row_of(r), j);
      if (weight != 0)
        for (int n = 0; n < 4; ++n) sum[r][n] += weight * x(j, column() + kTile * n);
    }
}

// The same with the transpose of weights.
__device__ void accumulate_transposed(const Scores& weights, const Wide& x, float (&sum)[kPer][4]) {
  for (int i = 0; i < kTile; ++i)
    for (int r = 0; r < kPer; ++r) {
      const float weight = weights(i, row_of(r));
      if (weight != 0)
        for (int n = 0; n < 4; ++n) sum[r][n] += weight * x(i, column() + kTile * n);
    }
}

template <class T>
__device__ void store(const float (&sum)[kPer][4], void* to, int64_t row0, int64_t rows, int64_t channel0,
                      int64_t channels) {
  for (int r = 0; r < kPer; ++r)
    for (int n = 0; n < 4; ++n) {
      const int64_t row = row0 + row_of(r), channel = channel0 + column() + kTile * n;
      if (row < rows && channel < channels)
        write(static_cast<T*>(to) + row * channels + channel, rounded<T>(sum[r][n]));
    }
}

__device__ float mask_at(const MsFlashCudaCall& c, int64_t at) {
  switch (c.mask_type) {
    case MSF_BOOL:
      return read(static_cast<const uint8_t*>(c.mask) + at) != 0 ? 0.0f : -INFINITY;
    case MSF_FLOAT16:
      return to_float(read(static_cast<const __half*>(c.mask) + at));
    case MSF_BFLOAT16:
      return to_float(read(static_cast<const __nv_bfloat16*>(c.mask) + at));
    default:
      return read(static_cast<const float*>(c.mask) + at);
  }
}

// The score of query i and key j from their product: capped, then masked. -inf where i does not see j. `slope` is its
// derivative by scale * dot.
__device__ float score(const MsFlashCudaCall& c, const Head& head, const Band& band, int64_t i, int64_t j, float dot,
                       float* slope) {
  *slope = 1;
  if (i >= c.q_len || j < band.begin(i) || j >= band.end(i)) return -INFINITY;
  float added = 0;
  if (c.mask_type != MSF_NONE)
    added = mask_at(
        c, head.b * c.mask_strides[0] + head.h * c.mask_strides[1] + i * c.mask_strides[2] + j * c.mask_strides[3]);
  if (added == -INFINITY) return added;
  if (c.softcap == 0) return dot * float(c.scale) + added;
  const float x = tanhf(dot * float(c.scale / c.softcap));
  *slope = 1 - x * x;
  return float(c.softcap) * x + added;
}

// Factor of a probability after dropout.
__device__ float kept(const MsFlashCudaCall& c, const Head& head, int64_t i, int64_t j) {
  if (c.dropout == 0) return 1;
  const msf::PhiloxKey key(c.seed, c.offset);
  uint32_t word[4] = {uint32_t(j >> 2), uint32_t(i), uint32_t(head.b * c.heads + head.h), key.offset};
  msf::philox4x32_10(word, key.k0, key.k1, [](uint32_t a, uint32_t m, uint32_t* high) {
    const uint64_t wide = uint64_t(a) * m;
    *high = uint32_t(wide >> 32);
    return uint32_t(wide);
  });
  return word[j & 3] >= msf::drop_threshold(c.dropout) ? float(1 / (1 - c.dropout)) : 0.0f;
}

// --------------------------------------------------------------------------------------------------------------------
// Forward
// --------------------------------------------------------------------------------------------------------------------
struct ForwardShared {
  Slice q, k;
  Scores p;
  Wide v;
  Tile<float, kTile, 4> largest, total;  // of a quarter of a row of the tile
  Column max, sum, shrink;               // of a row so far; what the past is multiplied with
};

template <class T>
__global__ void forward(MsFlashCudaCall c) {
  MSF_SHARED(ForwardShared, sm);
  const Head head(c, c.heads, (c.q_len + kTile - 1) / kTile);
  const Band band = band_of(c);
  const int64_t i0 = head.block * kTile, last = i0 + kTile < c.q_len ? i0 + kTile - 1 : c.q_len - 1;
  const T* q = static_cast<const T*>(c.q) + head.q0 * c.d;
  const T* k = static_cast<const T*>(c.k) + head.k0 * c.d;
  const T* v = static_cast<const T*>(c.v) + head.k0 * c.dv;

  float out[kPer][4] = {};
  if (threadIdx.x < kTile) {
    sm.max.put(int(threadIdx.x), 0, -INFINITY);
    sm.sum.put(int(threadIdx.x), 0, 0.0f);
  }
  for (int64_t j0 = band.begin(i0); j0 < band.end(last); j0 += kTile) {
    float s[kPer], slope;
    product<T>(q, i0, c.q_len, k, j0, c.k_len, c.d, &sm.q, &sm.k, s);
    for (int r = 0; r < kPer; ++r)
      sm.p.put(row_of(r), column(), score(c, head, band, i0 + row_of(r), j0 + column(), s[r], &slope));
    load<T>(&sm.v, v, j0, c.k_len, head.channel0, c.dv);
    __syncthreads();

    // online softmax, four threads to a row
    const int row = int(threadIdx.x) / 4, quarter = int(threadIdx.x) % 4, from = quarter * kTile / 4;
    float largest = -INFINITY;
    for (int j = from; j < from + kTile / 4; ++j) largest = fmaxf(largest, sm.p(row, j));
    sm.largest.put(row, quarter, largest);
    __syncthreads();
    const float before = sm.max(row, 0);
    float max = before;
    for (int n = 0; n < 4; ++n) max = fmaxf(max, sm.largest(row, n));
    const float base = max == -INFINITY ? 0.0f : max;  // no key so far: every weight is exp(-inf) = 0
    float total = 0;
    for (int j = from; j < from + kTile / 4; ++j) {
      const float weight = expf(sm.p(row, j) - base);
      total += weight;
      sm.p.put(row, j, weight * kept(c, head, i0 + row, j0 + j));
    }
    sm.total.put(row, quarter, total);
    __syncthreads();
    if (quarter == 0) {
      const float shrink = expf(before - base);
      sm.max.put(row, 0, max);
      sm.sum.put(row, 0,
                 sm.sum(row, 0) * shrink + sm.total(row, 0) + sm.total(row, 1) + sm.total(row, 2) + sm.total(row, 3));
      sm.shrink.put(row, 0, shrink);
    }
    __syncthreads();

    for (int r = 0; r < kPer; ++r)
      for (int n = 0; n < 4; ++n) out[r][n] *= sm.shrink(row_of(r), 0);
    accumulate(sm.p, sm.v, out);
  }

  __syncthreads();  // for rows that saw no tile
  for (int r = 0; r < kPer; ++r) {
    const float sum = sm.sum(row_of(r), 0);
    for (int n = 0; n < 4; ++n) out[r][n] = sum == 0 ? 0.0f : out[r][n] / sum;
  }
  store<T>(out, static_cast<T*>(c.out) + head.q0 * c.dv, i0, c.q_len, head.channel0, c.dv);
  const int64_t i = i0 + int(threadIdx.x);
  if (threadIdx.x < kTile && i < c.q_len && head.channel0 == 0) {
    const float max = sm.max(int(threadIdx.x), 0), sum = sm.sum(int(threadIdx.x), 0);
    if (c.row_max) write(c.row_max + head.q0 + i, max);
    if (c.row_sum) write(c.row_sum + head.q0 + i, sum);
    if (c.lse) write(c.lse + head.q0 + i, sum == 0 ? -INFINITY : max + logf(sum));
  }
}

// --------------------------------------------------------------------------------------------------------------------
// Backward
// --------------------------------------------------------------------------------------------------------------------
// delta = sum of dout * out - dlse: how a row as a whole pulls on each of its scores. A thread has a row.
template <class T>
__global__ void row_delta(MsFlashCudaCall c) {
  const int64_t row = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (row >= c.batch * c.heads * c.q_len) return;
  float delta = 0;
  for (int64_t e = row * c.dv; e < (row + 1) * c.dv; ++e)
    delta += to_float(read(static_cast<const T*>(c.dout) + e)) * to_float(read(static_cast<const T*>(c.out) + e));
  write(c.delta + row, c.dlse ? delta - read(c.dlse + row) : delta);
}

struct BackwardShared {
  Slice left, right;
  Scores p, ds;  // probabilities after dropout; gradients of scale * q.k
  Wide x;
};

// Fills p (where wanted) and ds for the queries from i0 and the keys from j0.
template <class T>
__device__ void tile_gradients(const MsFlashCudaCall& c, const Head& head, const Band& band, int64_t i0, int64_t j0,
                               BackwardShared* sm) {
  float s[kPer], dp[kPer];
  product<T>(static_cast<const T*>(c.q) + head.q0 * c.d, i0, c.q_len, static_cast<const T*>(c.k) + head.k0 * c.d, j0,
             c.k_len, c.d, &sm->left, &sm->right, s);
  product<T>(static_cast<const T*>(c.dout) + head.q0 * c.dv, i0, c.q_len, static_cast<const T*>(c.v) + head.k0 * c.dv,
             j0, c.k_len, c.dv, &sm->left, &sm->right, dp);
  for (int r = 0; r < kPer; ++r) {
    const int64_t i = i0 + row_of(r), j = j0 + column();
    float p = 0, ds = 0, slope;
    const float x = score(c, head, band, i, j, s[r], &slope);
    if (x != -INFINITY) {
      const int64_t row = head.q0 + i;
      const float keep = kept(c, head, i, j);
      p = expf(x - read(c.row_max + row)) / read(c.row_sum + row);
      ds = p * ((keep == 0 ? 0.0f : keep * dp[r]) - read(c.delta + row)) * slope;
      p *= keep;
    }
    sm->p.put(row_of(r), column(), p);
    sm->ds.put(row_of(r), column(), ds);
  }
}

template <class T>
__global__ void backward_q(MsFlashCudaCall c) {
  MSF_SHARED(BackwardShared, sm);
  const Head head(c, c.heads, (c.q_len + kTile - 1) / kTile);
  const Band band = band_of(c);
  const int64_t i0 = head.block * kTile, last = i0 + kTile < c.q_len ? i0 + kTile - 1 : c.q_len - 1;
  float dq[kPer][4] = {};
  for (int64_t j0 = band.begin(i0); j0 < band.end(last); j0 += kTile) {
    tile_gradients<T>(c, head, band, i0, j0, &sm);
    load<T>(&sm.x, static_cast<const T*>(c.k) + head.k0 * c.d, j0, c.k_len, head.channel0, c.d);
    __syncthreads();
    accumulate(sm.ds, sm.x, dq);
  }
  for (int r = 0; r < kPer; ++r)
    for (int n = 0; n < 4; ++n) dq[r][n] *= float(c.scale);
  store<T>(dq, static_cast<T*>(c.dq) + head.q0 * c.d, i0, c.q_len, head.channel0, c.d);
}

// A block owns keys, so that the sum over the queries and over the heads of a group has one writer and one order.
template <class T>
__global__ void backward_kv(MsFlashCudaCall c) {
  MSF_SHARED(BackwardShared, sm);
  Head head(c, c.kv_heads, (c.k_len + kTile - 1) / kTile);
  const Band band = band_of(c);
  const int64_t j0 = head.block * kTile, last = j0 + kTile < c.k_len ? j0 + kTile - 1 : c.k_len - 1;
  const int64_t first_query = Band::clamp(band.first_query(j0), 0, c.q_len);
  const int64_t end_query = Band::clamp(band.last_query(last) + 1, 0, c.q_len);
  const int64_t group = c.heads / c.kv_heads, first_head = head.h;
  float dk[kPer][4] = {}, dv[kPer][4] = {};
  for (int64_t h = first_head; h < first_head + group; ++h) {
    head.set(c, h);
    for (int64_t i0 = first_query; i0 < end_query; i0 += kTile) {
      tile_gradients<T>(c, head, band, i0, j0, &sm);
      load<T>(&sm.x, static_cast<const T*>(c.q) + head.q0 * c.d, i0, c.q_len, head.channel0, c.d);
      __syncthreads();
      accumulate_transposed(sm.ds, sm.x, dk);
      __syncthreads();
      load<T>(&sm.x, static_cast<const T*>(c.dout) + head.q0 * c.dv, i0, c.q_len, head.channel0, c.dv);
      __syncthreads();
      accumulate_transposed(sm.p, sm.x, dv);
    }
  }
  for (int r = 0; r < kPer; ++r)
    for (int n = 0; n < 4; ++n) dk[r][n] *= float(c.scale);
  store<T>(dk, static_cast<T*>(c.dk) + head.k0 * c.d, j0, c.k_len, head.channel0, c.d);
  store<T>(dv, static_cast<T*>(c.dv_) + head.k0 * c.dv, j0, c.k_len, head.channel0, c.dv);
}

// --------------------------------------------------------------------------------------------------------------------
// Launches
// --------------------------------------------------------------------------------------------------------------------
int64_t blocks(int64_t n, int64_t size) { return (n + size - 1) / size; }

template <class T>
const char* run_forward(const MsFlashCudaCall& c, void* stream) {
  return launch(forward<T>, c.batch * c.heads * blocks(c.q_len, kTile), blocks(c.dv > 0 ? c.dv : 1, kWide), kThreads,
                stream, c);
}

template <class T>
const char* run_backward(const MsFlashCudaCall& c, void* stream) {
  const char* reason = launch(row_delta<T>, blocks(c.batch * c.heads * c.q_len, kThreads), 1, kThreads, stream, c);
  if (!reason)
    reason = launch(backward_q<T>, c.batch * c.heads * blocks(c.q_len, kTile), blocks(c.d, kWide), kThreads, stream, c);
  if (!reason)
    reason = launch(backward_kv<T>, c.batch * c.kv_heads * blocks(c.k_len, kTile),
                    blocks(c.d > c.dv ? c.d : c.dv, kWide), kThreads, stream, c);
  return reason;
}

const char* refusal(const MsFlashCudaCall& c) {
  if (c.type != MSF_FLOAT32 && c.type != MSF_FLOAT16 && c.type != MSF_BFLOAT16)
    return "For 'msflash_cuda', 'type' must be float32, float16 or bfloat16.";
  if (c.d < 1) return "For 'msflash_cuda', 'd' must be at least 1.";
  if (c.heads > 0 && (c.kv_heads < 1 || c.heads % c.kv_heads != 0))
    return "For 'msflash_cuda', 'heads' must be a multiple of 'kv_heads'.";
  if (!(c.dropout >= 0 && c.dropout < 1)) return "For 'msflash_cuda', 'dropout' must be in [0, 1).";
  const int64_t most = c.q_len > c.k_len ? c.q_len : c.k_len;
  if (c.batch * c.heads * blocks(most, kTile) > INT32_MAX)
    return "For 'msflash_cuda', there are more blocks than a launch can have.";
  return nullptr;
}

}  // namespace

const char* msflash_cuda_forward(const MsFlashCudaCall* call, void* stream) {
  if (const char* reason = refusal(*call)) return reason;
  return call->type == MSF_FLOAT32   ? run_forward<float>(*call, stream)
         : call->type == MSF_FLOAT16 ? run_forward<__half>(*call, stream)
                                     : run_forward<__nv_bfloat16>(*call, stream);
}

const char* msflash_cuda_backward(const MsFlashCudaCall* call, void* stream) {
  if (const char* reason = refusal(*call)) return reason;
  return call->type == MSF_FLOAT32   ? run_backward<float>(*call, stream)
         : call->type == MSF_FLOAT16 ? run_backward<__half>(*call, stream)
                                     : run_backward<__nv_bfloat16>(*call, stream);
}
