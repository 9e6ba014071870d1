// One instruction of the host twin, with every argument taken from text: "name=value" lines. Integers reach the twin as
// they are, so that an argument out of its range is seen there and not cut off here.
#pragma once
#include <cstdlib>
#include <cstring>
#include <map>
#include <stdexcept>
#include <string>

#include "kernel_operator.h"
#include "launch.h"

namespace driver {

using namespace AscendC;

class Arguments {
 public:
  explicit Arguments(const char* text) {
    while (*text) {
      const char* equals = std::strchr(text, '=');
      const char* end = std::strchr(text, '\n');
      values_[std::string(text, equals)] = std::string(equals + 1, end);
      text = end + 1;
    }
  }
  bool Has(const std::string& name) const { return values_.count(name) > 0; }
  const std::string& Text(const std::string& name) const {
    const auto found = values_.find(name);
    if (found == values_.end()) throw std::invalid_argument("driver: no argument " + name);
    return found->second;
  }
  int64_t Int(const std::string& name) const {
    const std::string& text = Text(name);
    return text[0] == '-' ? std::strtoll(text.c_str(), nullptr, 10)
                          : static_cast<int64_t>(std::strtoull(text.c_str(), nullptr, 10));
  }
  int64_t Int(const std::string& name, int64_t other) const { return Has(name) ? Int(name) : other; }
  double Real(const std::string& name) const { return std::strtod(Text(name).c_str(), nullptr); }

 private:
  std::map<std::string, std::string> values_;
};

struct Memories {
  uint8_t* gm;
  uint64_t gm_bytes;
  uint8_t *ub, *l1, *l0a, *l0b, *l0c, *bt;
};

template <class T>
struct Type {
  using type = T;
};

// Calls `body` with the first of `Ts` that has the name.
template <class... Ts, class Body>
void ForType(const std::string& name, Body body) {
  bool found = false;
  const auto attempt = [&](auto type) {
    if (!found && name == ms_twin::TypeName<typename decltype(type)::type>()) {
      found = true;
      body(type);
    }
  };
  (attempt(Type<Ts>{}), ...);
  if (!found) throw std::invalid_argument("driver: no such overload for " + name);
}

struct Position {
  TPosition position;
  uint32_t bytes;
};

inline Position PositionOf(const std::string& memory) {
  static const std::map<std::string, Position> positions = {
      {"UB", {TPosition::VECCALC, 192 << 10}}, {"L1", {TPosition::A1, 512 << 10}},   {"L0A", {TPosition::A2, 64 << 10}},
      {"L0B", {TPosition::B2, 64 << 10}},      {"L0C", {TPosition::CO1, 128 << 10}}, {"BT", {TPosition::C2, 1 << 10}}};
  return positions.at(memory);
}

class Call {
 public:
  Call(const Arguments& arguments, const Memories& memories) : a_(arguments), m_(memories) {}

  // The tensor `name` of memory `memory`: to the end of the memory unless `<name>.elements` says otherwise. Tensors
  // start on multiples of 32 bytes; what lies between is part of one.
  template <class T>
  LocalTensor<T> Local(const std::string& name, const std::string& memory = "UB") const {
    constexpr int64_t kSize = sizeof(T);
    const Position where = PositionOf(memory);
    const int64_t at = Address(name), start = at / 32 * 32;
    const int64_t room = at < where.bytes ? (where.bytes - start) / kSize : 1;
    const LocalTensor<T> whole(where.position, static_cast<uint32_t>(start),
                               static_cast<uint32_t>(a_.Int(name + ".elements", room)));
    return whole[static_cast<uint32_t>((at - start) / kSize)];
  }
  template <class T>
  GlobalTensor<T> Global(const std::string& name) const {
    GlobalTensor<T> tensor;
    tensor.SetGlobalBuffer(reinterpret_cast<__gm__ T*>(m_.gm + Address(name)));
    return tensor;
  }
  int64_t I(const char* name) const { return a_.Int(name); }
  int64_t I(const char* name, int64_t other) const { return a_.Int(name, other); }
  const std::string& S(const char* name) const { return a_.Text(name); }
  bool Has(const char* name) const { return a_.Has(name); }
  template <class T>
  T Scalar() const {
    return static_cast<T>(a_.Real("scalar"));
  }

  UnaryRepeatParams Unary(const char* source = "src") const {
    UnaryRepeatParams p;
    const std::string src = source;
    p.dstBlkStride = I("dst.block", 1);
    p.dstRepStride = I("dst.repeat", 8);
    p.srcBlkStride = a_.Int(src + ".block");
    p.srcRepStride = a_.Int(src + ".repeat");
    return p;
  }
  BinaryRepeatParams Binary() const {
    BinaryRepeatParams p;
    p.dstBlkStride = I("dst.block", 1);
    p.dstRepStride = I("dst.repeat", 8);
    p.src0BlkStride = I("src0.block");
    p.src0RepStride = I("src0.repeat");
    p.src1BlkStride = I("src1.block", 1);
    p.src1RepStride = I("src1.repeat", 8);
    return p;
  }

  // The four ways to say which lanes take part. `first`: called with a count. `strided`: with a mask and a repeat.
  // `raw`: with a repeat, under a mask register that was set before.
  template <class T, class First, class Strided, class Raw>
  void Masked(First first, Strided strided, Raw raw) const {
    const std::string kind = S("mask");
    if (kind == "count") return first(I("mask.0"));
    if (kind == "first") return strided(static_cast<uint64_t>(I("mask.0")), I("repeat"));
    if (kind == "bits") {
      uint64_t bits[2] = {static_cast<uint64_t>(I("mask.0")), static_cast<uint64_t>(I("mask.1"))};
      return strided(bits, I("repeat"));
    }
    SetMaskCount();
    SetVectorMask<T, MaskMode::COUNTER>(0, I("mask.0"));
    raw(I("repeat"));
    SetMaskNorm();
    ResetMask();
  }
  // The reductions take their mask as a number or a pattern, and no count.
  template <class Strided>
  void Masked(Strided strided) const {
    if (S("mask") == "bits") {
      uint64_t bits[2] = {static_cast<uint64_t>(I("mask.0")), static_cast<uint64_t>(I("mask.1"))};
      return strided(bits);
    }
    strided(I("mask.0"));
  }

  void Run() const;

 private:
  int64_t Address(const std::string& name) const {
    return a_.Has(name + ".at") ? a_.Int(name + ".at") : a_.Int(name + "_at");
  }
  bool Moves(const std::string& op) const;
  bool Cube(const std::string& op) const;
  bool Vector(const std::string& op) const;
  bool Fill(const std::string& op) const;
  bool Choice(const std::string& op) const;
  bool Reductions(const std::string& op) const;
  void Convert() const;
  void Out() const;
  template <class From, class To>
  void FixpipeAs() const;

  const Arguments& a_;
  const Memories& m_;
};

}  // namespace driver
