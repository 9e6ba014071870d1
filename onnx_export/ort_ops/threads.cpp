#include "ort_ops/threads.h"

#include "cpu/job.h"
#include "ort_ops/node.h"

namespace {

thread_local const ort::Api* host = nullptr;
thread_local const ort::KernelContext* session = nullptr;

// More workers than any pool has threads: one that comes late finds no task and returns.
constexpr int64_t kWorkers = 256;

}  // namespace

namespace ort_ops {

SessionThreads::SessionThreads(const ort::Api* api, const ort::KernelContext* context) {
  host = api;
  session = context;
}

SessionThreads::~SessionThreads() {
  host = nullptr;
  session = nullptr;
}

}  // namespace ort_ops

namespace msf {

// The session decides.
int num_threads() { return 0; }
void set_num_threads(int) {}

void run_tasks(int64_t n, void (*body)(void*, int64_t), void* context) {
  Job job{n, body, context, {}, {}, {}};
  if (n > 1 && host)
    ort_ops::check(host, ort::KernelContext_ParallelFor(
                             host, session, [](void* j, size_t) { static_cast<Job*>(j)->work(); },
                             size_t(n < kWorkers ? n : kWorkers), 0, &job));
  else
    job.work();
  if (job.error) std::rethrow_exception(job.error);
}

}  // namespace msf
