// New rows of keys and values into their caches: what decoding does first. The vector cores copy, in chunks dealt out
// in turn; nothing is computed. Rows without a place in the caches go nowhere.
#pragma once
#include "vector.h"

namespace msf {

template <class T>
class CacheAppend {
 public:
  __aicore__ inline CacheAppend(const AttentionTiling& a, const Inputs& in, int64_t cores)
      : a_(a), in_(in), cores_(cores) {}

  __aicore__ inline void Run(Address k, const TensorLayout& new_k, Address v, const TensorLayout& new_v) {
    for (int32_t i = 0; i < kSlots; ++i) SetFlag<HardEvent::MTE3_MTE2>(i);
    Rows(k, new_k, in_.key, a_.k, a_.d);
    Rows(v, new_v, in_.value, a_.v, a_.dv);
    for (int32_t i = 0; i < kSlots; ++i) WaitFlag<HardEvent::MTE3_MTE2>(i);
  }

 private:
  static constexpr int32_t kSlots = 2, kBytes = 32 * 1024;  // of UB

  __aicore__ inline void Rows(Address from, const TensorLayout& x, Address cache, const TensorLayout& y,
                              int32_t channels) {
    const int32_t chunk = kBytes / int32_t(sizeof(T)) / channels;
    const int64_t chunks = (a_.new_len + chunk - 1) / chunk, units = a_.batch * a_.kv_heads * chunks;
    for (int64_t unit = AscendC::GetBlockIdx(); unit < units; unit += cores_) {
      const int64_t row = unit % chunks * chunk, h = unit / chunks % a_.kv_heads, b = unit / chunks / a_.kv_heads;
      const int32_t n = int32_t(a_.new_len - row < chunk ? a_.new_len - row : chunk);
      const Sequence seq = SequenceOf(a_, in_, b);
      if (seq.lost) continue;
      const int64_t first = seq.k_len - a_.new_len + row;
      const LocalTensor<T> rows = Local<T>(TPosition::VECIN, slot_ * kBytes, kBytes);
      WaitFlag<HardEvent::MTE3_MTE2>(slot_);
      CopyIn(rows, Global<T>(from, b * x.b + h * x.h + row * x.s), x.s, n, channels, channels);
      SetFlag<HardEvent::MTE2_MTE3>(slot_);
      WaitFlag<HardEvent::MTE2_MTE3>(slot_);
      for (int32_t r = 0; r < n;) {
        const RowRun run = RunOf(a_, in_, y, a_.page_size, b, h, first + r, n - r);
        if (!run.lost) CopyOut(Global<T>(cache, run.at), rows[r * channels], y.s, run.rows, channels, channels);
        r += run.rows;
      }
      SetFlag<HardEvent::MTE3_MTE2>(slot_);
      slot_ = slot_ + 1 < kSlots ? slot_ + 1 : 0;
    }
  }

  const AttentionTiling& a_;
  const Inputs& in_;
  int64_t cores_;
  int32_t slot_ = 0;
};

}  // namespace msf
