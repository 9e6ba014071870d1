#include "cpu/threads.h"

#include <pthread.h>
#include <sched.h>

#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <mutex>
#include <thread>

#include "cpu/job.h"

namespace msf {
namespace {

// Never destroyed: its threads may outlive every static of the library.
class Pool {
 public:
  bool try_run(Job* job, int threads) {
    if (busy_.exchange(true, std::memory_order_acquire)) return false;
    {
      std::lock_guard<std::mutex> hold(lock_);
      for (; started_ < threads - 1; ++started_) std::thread([this, id = started_] { serve(id); }).detach();
      job_ = job;
      helpers_ = threads - 1;
      active_ = 0;
      ++generation_;
    }
    wake_.notify_all();
    job->work();
    std::unique_lock<std::mutex> hold(lock_);
    job_ = nullptr;  // a helper that has not come by now need not come
    done_.wait(hold, [this] { return active_ == 0; });
    busy_.store(false, std::memory_order_release);
    return true;
  }

 private:
  void serve(int id) {
    uint64_t seen = 0;
    std::unique_lock<std::mutex> hold(lock_);
    for (;;) {
      wake_.wait(hold, [&] { return generation_ != seen; });
      seen = generation_;
      if (!job_ || id >= helpers_) continue;
      Job* job = job_;
      ++active_;
      hold.unlock();
      job->work();
      hold.lock();
      if (--active_ == 0) done_.notify_one();
    }
  }

  std::atomic<bool> busy_{false};
  std::mutex lock_;
  std::condition_variable wake_, done_;
  Job* job_ = nullptr;
  int started_ = 0, helpers_ = 0, active_ = 0;
  uint64_t generation_ = 0;
};

std::atomic<Pool*> pool{nullptr};
std::atomic<int> wanted_threads{0};
thread_local bool inside = false;

Pool& the_pool() {
  // Threads do not survive a fork, so the child leaves the parent's pool alone and makes its own.
  static const int registered = pthread_atfork(nullptr, nullptr, [] {
    pool.store(nullptr);
    inside = false;
  });
  (void)registered;
  Pool* p = pool.load();
  if (!p) {
    Pool* fresh = new Pool;
    if (pool.compare_exchange_strong(p, fresh))
      p = fresh;
    else
      delete fresh;
  }
  return *p;
}

int default_threads() {
  // not OMP_NUM_THREADS: importing MindSpore sets it to 1
  if (const char* text = std::getenv("MS_FLASH_NUM_THREADS"))
    if (int n = std::atoi(text); n > 0) return n;
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0) return CPU_COUNT(&set) > 0 ? CPU_COUNT(&set) : 1;
  return std::thread::hardware_concurrency() ? int(std::thread::hardware_concurrency()) : 1;
}

}  // namespace

int num_threads() {
  int n = wanted_threads.load();
  if (n <= 0) wanted_threads.store(n = default_threads());
  return n;
}

void set_num_threads(int n) { wanted_threads.store(n > 0 ? n : 0); }

void run_tasks(int64_t n, void (*body)(void*, int64_t), void* context) {
  Job job{n, body, context, {}, {}, {}};
  const int64_t threads = num_threads() < n ? num_threads() : n;
  const bool nested = inside;
  inside = true;
  if (threads <= 1 || nested || !the_pool().try_run(&job, int(threads))) job.work();
  inside = nested;
  if (job.error) std::rethrow_exception(job.error);
}

}  // namespace msf
