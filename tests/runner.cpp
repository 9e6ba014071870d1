// Runs calls of the native library that arrive on stdin and sends the arrays back on stdout: for instruction sets that
// this machine only emulates. tests/native.py is the other end; MS_FLASH_CPU_RUNNER names the command.
//
// Request: op and spec (texts), count (i32); per array its dtype (text), rank (i32), sizes (i64), bytes (i64), data.
// Reply: status (i32), then the error (text) if it is not 0, else the data of every array. A text is its length (i32)
// and its bytes.
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "cpu/api.h"

namespace {

bool read(void* to, size_t n) { return n == 0 || std::fread(to, n, 1, stdin) == 1; }
void write(const void* from, size_t n) {
  if (n && std::fwrite(from, n, 1, stdout) != 1) std::exit(1);
}
template <class T>
T number() {
  T x;
  if (!read(&x, sizeof x)) std::exit(1);
  return x;
}
std::string text() {
  std::string s(size_t(number<int32_t>()), '\0');
  if (!read(s.data(), s.size())) std::exit(1);
  return s;
}

struct Array {
  std::string dtype;
  std::vector<int64_t> shape;
  std::vector<char> data;
};

}  // namespace

int main() {
  for (int c; (c = std::getc(stdin)) != EOF;) {
    std::ungetc(c, stdin);
    const std::string op = text(), spec = text();
    std::vector<Array> arrays(size_t(number<int32_t>()));
    std::vector<void*> params;
    std::vector<int> ranks;
    std::vector<int64_t*> shapes;
    std::vector<const char*> dtypes;
    for (Array& a : arrays) {
      a.dtype = text();
      a.shape.resize(size_t(number<int32_t>()));
      if (!read(a.shape.data(), a.shape.size() * 8)) return 1;
      a.data.resize(size_t(number<int64_t>()));
      if (!read(a.data.data(), a.data.size())) return 1;
      params.push_back(a.dtype == "none" ? nullptr : a.data.data());
      ranks.push_back(int(a.shape.size()));
      shapes.push_back(a.shape.data());
      dtypes.push_back(a.dtype.c_str());
    }
    const int32_t status = msflash_cpu_call(op.c_str(), spec.c_str(), int(arrays.size()), params.data(), ranks.data(),
                                            shapes.data(), dtypes.data());
    write(&status, sizeof status);
    if (status) {
      const std::string error = msflash_cpu_last_error();
      const int32_t length = int32_t(error.size());
      write(&length, sizeof length);
      write(error.data(), error.size());
    } else {
      for (const Array& a : arrays) write(a.data.data(), a.data.size());
    }
    std::fflush(stdout);
  }
}
