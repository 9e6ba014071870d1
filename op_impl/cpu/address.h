// Where an input lies in memory: how a host learns that it would hand a copy to an op that writes in place. The address
// is the two floats of the result, bit by bit.
#pragma once
#include <cstring>
#include <string>
#include <vector>

#include "cpu/call.h"

namespace msf {

enum class AddressOp { forward };

struct AddressSpec {
  explicit AddressSpec(const std::string&) {}
};

inline void run(AddressOp, const AddressSpec&, const std::vector<Array>& params) {
  if (params.size() != 2) fail_in("address", "the op takes 2 arrays, but got ", params.size(), ".");
  std::memcpy(params[1].data, &params[0].data, sizeof(void*));
}
inline std::vector<std::vector<int64_t>> infer_shapes(AddressOp, const AddressSpec&,
                                                      const std::vector<std::vector<int64_t>>&) {
  return {{2}};
}
inline int dtype_source(AddressOp, const AddressSpec&, int) { return -1; }
inline int saved_inputs(AddressOp) { return 0; }
inline const std::string& present(const AddressSpec&) {
  static const std::string one = "1";
  return one;
}

}  // namespace msf
