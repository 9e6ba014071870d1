// Attention over a cache of keys and values that the op appends to.
#pragma once
#include <string>
#include <vector>

#include "cpu/call.h"

namespace msf {

// Input slots, in the order of op_impl/ops.yaml.
enum KvCacheSlot {
  kKvQuery,
  kKeyCache,
  kValueCache,
  kNewKey,
  kNewValue,
  kCacheLengths,
  kBlockTable,
  kCos,
  kSin,
  kKvAlibi,
  kKvSinks,
  kKvCacheInputs
};

enum class KvCacheOp { forward };

// The `spec` attribute: "key=value;...|" and then that of the attention inside.
struct KvCacheSpec {
  bool interleaved = false;  // of the rotary embedding
  int64_t splits = 0;
  std::string inputs;  // one 0 or 1 per input slot
  Spec attention;

  explicit KvCacheSpec(const std::string& text);
  bool has(int slot) const { return inputs[slot] == '1'; }
  int position(int slot) const;  // among the inputs that are present
};

void run(KvCacheOp op, const KvCacheSpec& spec, const std::vector<Array>& params);
std::vector<std::vector<int64_t>> infer_shapes(KvCacheOp op, const KvCacheSpec& spec,
                                               const std::vector<std::vector<int64_t>>& inputs);
int dtype_source(KvCacheOp op, const KvCacheSpec& spec, int output);
int saved_inputs(KvCacheOp op);
const std::string& present(const KvCacheSpec& spec);

}  // namespace msf
