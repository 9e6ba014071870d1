// Lends the session's own threads to the kernels, so that its thread settings hold and no two pools compete for the
// cores. Takes the place of op_impl/cpu/threads.cpp in this library.
#pragma once
#include "ort_ops/ort_api.h"

namespace ort_ops {

// While it lives, tasks that this thread starts run on the pool of the session that `context` belongs to.
class SessionThreads {
 public:
  SessionThreads(const ort::Api* api, const ort::KernelContext* context);
  ~SessionThreads();
  SessionThreads(const SessionThreads&) = delete;
  SessionThreads& operator=(const SessionThreads&) = delete;
};

}  // namespace ort_ops
