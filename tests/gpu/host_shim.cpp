#include "host_shim.h"

#include <ucontext.h>

#include <cstdarg>
#include <cstddef>
#include <memory>

namespace shim {

Index3 thread, block;
int epoch;
long barriers_seen;

namespace {

constexpr size_t kStack = 256 * 1024;

struct Fibre {
  ucontext_t context;
  std::unique_ptr<char[]> stack{new char[kStack]};
  int line = 0;  // of the barrier it waits at
  bool done = false;
};

struct Range {
  const char *begin, *end;
  bool writable;
};

std::vector<Range> ranges;
std::string violation;
ucontext_t scheduler;
std::vector<Fibre> fibres;
int current;
void (*kernel)(void*);
void* kernel_context;
std::vector<std::max_align_t> shared_bytes;
bool shared_ready;
long skipped_barrier = -1;

void start() {
  try {
    kernel(kernel_context);
  } catch (const Violation&) {
  }
  fibres[current].done = true;
  swapcontext(&fibres[current].context, &scheduler);
}

void resume(int i) {
  current = i;
  thread.x = unsigned(i);
  swapcontext(&scheduler, &fibres[i].context);
}

void run_block(int threads) {
  epoch = 0;
  shared_ready = false;
  for (int i = 0; i < threads; ++i) {
    Fibre& f = fibres[i];
    f.done = false;
    getcontext(&f.context);
    f.context.uc_stack.ss_sp = f.stack.get();
    f.context.uc_stack.ss_size = kStack;
    f.context.uc_link = nullptr;
    makecontext(&f.context, start, 0);
  }
  for (;;) {
    for (int i = 0; i < threads; ++i) {
      resume(epoch % 2 ? threads - 1 - i : i);
      if (!violation.empty()) return;
    }
    for (int i = 1; i < threads; ++i) {
      const Fibre &a = fibres[0], &b = fibres[i];
      if (a.done == b.done && (a.done || a.line == b.line)) continue;
      char text[160];
      std::snprintf(text, sizeof text, "divergent barrier: thread 0 %s %d, thread %d %s %d",
                    a.done ? "ended, line" : "waits in line", a.done ? 0 : a.line, i,
                    b.done ? "ended, line" : "waits in line", b.done ? 0 : b.line);
      violation = text;
      return;
    }
    if (fibres[0].done) return;
    ++epoch;
    ++barriers_seen;
  }
}

}  // namespace

void fail(const char* format, ...) {
  char text[300];
  va_list arguments;
  va_start(arguments, format);
  const int n = std::vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  std::snprintf(text + n, sizeof text - size_t(n), " (thread %u of block (%u, %u), after barrier %d)", thread.x,
                block.x, block.y, epoch);
  if (violation.empty()) violation = text;
  throw Violation();
}

void barrier(int line) {
  if (line == skipped_barrier) return;
  fibres[current].line = line;
  swapcontext(&fibres[current].context, &scheduler);
}

void check_global(const void* p, size_t bytes, bool write) {
  if (ranges.empty()) return;  // the test named no buffers
  const char* at = static_cast<const char*>(p);
  for (const Range& range : ranges)
    if (at >= range.begin && at + bytes <= range.end && (range.writable || !write)) return;
  fail("global memory %s outside of the buffers of this call", write ? "written" : "read");
}

void* shared_memory(size_t bytes, void (*construct)(void*)) {
  if (!shared_ready) {
    shared_bytes.resize(bytes / sizeof(std::max_align_t) + 1);
    construct(shared_bytes.data());
    shared_ready = true;
  }
  return shared_bytes.data();
}

const char* run(int64_t blocks_x, int64_t blocks_y, int threads, void (*body)(void*), void* context) {
  violation.clear();
  kernel = body;
  kernel_context = context;
  while (int(fibres.size()) < threads) fibres.emplace_back();
  for (int64_t y = 0; y < blocks_y; ++y)
    for (int64_t x = 0; x < blocks_x; ++x) {
      block.x = unsigned(x);
      block.y = unsigned(y);
      run_block(threads);
      if (!violation.empty()) return violation.c_str();
    }
  return nullptr;
}

}  // namespace shim

// For the tests
extern "C" {
void shim_forget_buffers() { shim::ranges.clear(); }
void shim_buffer(const void* p, size_t bytes, int writable) {
  shim::ranges.push_back({static_cast<const char*>(p), static_cast<const char*>(p) + bytes, writable != 0});
}
void shim_skip_barrier(long line) { shim::skipped_barrier = line; }
long shim_barriers_seen() { return shim::barriers_seen; }
}
