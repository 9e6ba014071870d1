// What a pool of threads hands out: the tasks of one call. Private to the implementations of run_tasks.
#pragma once
#include <atomic>
#include <exception>
#include <mutex>

#include "cpu/threads.h"

namespace msf {

struct Job {
  int64_t n;
  void (*body)(void*, int64_t);
  void* context;
  std::atomic<int64_t> next{0};
  std::mutex error_lock;
  std::exception_ptr error;

  // Takes tasks until there are none. Exceptions wait for the caller: a pool's threads must not see them.
  void work() {
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < n;) try {
        body(context, i);
      } catch (...) {
        std::lock_guard<std::mutex> hold(error_lock);
        if (!error) error = std::current_exception();
        next.store(n, std::memory_order_relaxed);
      }
    trim_thread_scratch();
  }
};

}  // namespace msf
