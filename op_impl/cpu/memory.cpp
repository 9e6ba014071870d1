// Memory of the kernels; whose threads they run on makes no difference here.
#include <cstdlib>
#include <new>

#include "cpu/threads.h"

namespace msf {
namespace {

struct Scratch {
  char* data = nullptr;
  size_t size = 0;

  ~Scratch() { release(); }
  void release() {
    free_aligned(data);
    data = nullptr;
    size = 0;
  }
};
thread_local Scratch scratch;
constexpr size_t kKeepScratch = size_t(8) << 20;

}  // namespace

void* allocate_aligned(size_t bytes) {
  void* p = nullptr;
  if (posix_memalign(&p, 64, bytes ? bytes : 64) != 0) throw std::bad_alloc();
  return p;
}

void free_aligned(void* p) { std::free(p); }

char* thread_scratch(size_t bytes) {
  if (bytes > scratch.size) {
    scratch.release();
    scratch.data = static_cast<char*>(allocate_aligned(bytes));
    scratch.size = bytes;
  }
  return scratch.data;
}

void trim_thread_scratch() {
  if (scratch.size > kKeepScratch) scratch.release();
}

}  // namespace msf
