// A pool of threads that takes numbered tasks.
#pragma once
#include <cstddef>
#include <cstdint>

namespace msf {

int num_threads();            // 0: not known, the host of the library has threads of its own
void set_num_threads(int n);  // n <= 0: as many as the machine gives this process

// Runs body(context, i) for every i in [0, n), each once, in rising order of start. The caller works too. Which thread
// runs a task is open, so tasks write disjoint memory. A caller that finds the pool busy (another caller, or a nested
// call) does its tasks alone; a forked child starts a pool of its own.
void run_tasks(int64_t n, void (*body)(void*, int64_t), void* context);

template <class F>
void run_tasks(int64_t n, F f) {
  run_tasks(n, [](void* c, int64_t i) { (*static_cast<F*>(c))(i); }, &f);
}

// 64-byte aligned memory; throws std::bad_alloc.
void* allocate_aligned(size_t bytes);
void free_aligned(void* p);

// Memory of this thread, 64-byte aligned, contents undefined, valid until its next call. Throws std::bad_alloc.
char* thread_scratch(size_t bytes);
void trim_thread_scratch();  // gives it back if it is more than 8 MiB

}  // namespace msf
