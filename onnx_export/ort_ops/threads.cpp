#include "ort_ops/threads.h"

#include <atomic>
#include <cstdlib>
#include <exception>
#include <memory>
#include <mutex>
#include <new>

#include "cpu/threads.h"
#include "ort_ops/node.h"

namespace {

thread_local const ort::Api* host = nullptr;
thread_local const ort::KernelContext* session = nullptr;

struct Job {
  int64_t n;
  void (*body)(void*, int64_t);
  void* context;
  std::atomic<int64_t> next{0};
  std::mutex error_lock;
  std::exception_ptr error;

  // Takes tasks until there are none. Exceptions wait: the runtime's threads must not see them.
  void work() {
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < n;) try {
        body(context, i);
      } catch (...) {
        std::lock_guard<std::mutex> hold(error_lock);
        if (!error) error = std::current_exception();
        next.store(n, std::memory_order_relaxed);
      }
  }
};

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

void* allocate_aligned(size_t bytes) {
  void* p = nullptr;
  if (posix_memalign(&p, 64, bytes ? bytes : 64) != 0) throw std::bad_alloc();
  return p;
}

void free_aligned(void* p) { std::free(p); }

char* thread_scratch(size_t bytes) {
  struct Free {
    void operator()(char* p) const { free_aligned(p); }
  };
  thread_local std::unique_ptr<char, Free> scratch;
  thread_local size_t size = 0;
  if (bytes > size) {
    size = 0;
    scratch.reset();
    scratch.reset(static_cast<char*>(allocate_aligned(bytes)));
    size = bytes;
  }
  return scratch.get();
}

}  // namespace msf
