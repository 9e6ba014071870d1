// What the kernels around a cache of keys and values are asked to do.
#pragma once
#include "common/problem.h"

namespace msf {

// Rotary position embedding: channels c and c + pairs (or 2c and 2c + 1, interleaved) turn by the angle of (row's
// position, c). Channels from 2 * pairs on stay as they are.
struct Rotary {
  const void *cos = nullptr, *sin = nullptr;  // [position][pairs]
  DType dtype = DType::none;
  int64_t pairs = 0;
  bool interleaved = false;
};

// Copies rows of every (batch, head), rounded to the dtype of `to`: row i to row first[b] + i, which `pages` may place.
struct Append {
  Tensor4 from, to;
  int64_t batch = 0, heads = 0, rows = 0, channels = 0;
  const int64_t* first = nullptr;     // [batch], of `to`
  const int64_t* position = nullptr;  // [batch], of row 0, for `rotary`
  Pages pages;
  Rotary rotary;
  bool high = false;
};

// Attention outputs over parts of the keys, and their log-sum-exps, to those over all keys.
struct Merge {
  int64_t parts = 0, batch = 0, heads = 0, rows = 0, channels = 0;
  Tensor4 outs, out;            // of `outs` the first part
  int64_t part_elements = 0;    // from one part to the next
  const float* lses = nullptr;  // [part][batch][head][row]
  float* lse = nullptr;
  bool high = false;
};

}  // namespace msf
