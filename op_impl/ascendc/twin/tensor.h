// GlobalTensor, LocalTensor, LocalMemAllocator.
#pragma once
#include <algorithm>

#include "machine.h"

namespace ms_twin {

inline AscendC::Hardware HardwareOf(AscendC::TPosition position) {
  using AscendC::Hardware;
  using AscendC::TPosition;
  switch (position) {
    case TPosition::VECIN:
    case TPosition::VECOUT:
    case TPosition::VECCALC:
      return Hardware::UB;
    case TPosition::A1:
    case TPosition::B1:
    case TPosition::C1:
      return Hardware::L1;
    case TPosition::A2:
      return Hardware::L0A;
    case TPosition::B2:
      return Hardware::L0B;
    case TPosition::CO1:
      return Hardware::L0C;
    case TPosition::C2:
      return Hardware::BIAS;
    case TPosition::C2PIPE2GM:
      return Hardware::FIXBUF;
    case TPosition::GM:
      return Hardware::GM;
    default:
      return Hardware::MAX;
  }
}

inline const char* HardwareName(AscendC::Hardware hardware) {
  static const char* const names[] = {"GM", "UB", "L1", "L0A", "L0B", "L0C", "BT", "FB", "?"};
  return names[static_cast<int>(hardware)];
}

// A scalar access blocks the scalar unit for a while; the figure is an estimate, nothing publishes it.
inline Cost ScalarCost() {
  Cost cost;
  cost.occupancy[kFast] = 4;
  cost.occupancy[kSlow] = 20;
  return cost;
}

template <class T>
T ScalarRead(const char* name, const Region& region, Site site) {
  Instruction in(name, PIPE_S, site);
  in.Read(region);
  T value{};
  in.Issue(
      ScalarCost(), [&] { std::memcpy(&value, region.memory->data + region.offset, sizeof(T)); },
      [&] { in.Fail(Fault::uninitialised, "reads a value that nobody wrote"); });
  return value;
}
template <class T>
void ScalarWrite(const char* name, const Region& region, T value, Site site) {
  Instruction in(name, PIPE_S, site);
  in.Write(region);
  in.Issue(ScalarCost(), [&] { std::memcpy(region.memory->data + region.offset, &value, sizeof(T)); });
}

}  // namespace ms_twin

namespace AscendC {

template <class T>
class GlobalTensor {
 public:
  using PrimType = T;

  void SetGlobalBuffer(T* p, uint64_t elements) {
    pointer_ = p;
    size_ = elements;
    bounded_ = true;
    Find();
  }
  void SetGlobalBuffer(T* p) {
    pointer_ = p;
    size_ = 0;
    bounded_ = false;
    Find();
  }
  GlobalTensor operator[](uint64_t offset) const {
    GlobalTensor part = *this;
    part.pointer_ += offset;
    if (bounded_) part.size_ = offset < size_ ? size_ - offset : 0;
    return part;
  }
  uint64_t GetSize() const { return size_; }
  T* GetPhyAddr(uint64_t offset = 0) const { return pointer_ + offset; }
  T GetValue(uint64_t offset, ms_twin::Site site = ms_twin::Site::Here()) const {
    return ms_twin::ScalarRead<T>("GetValue", (*this)[offset].Bytes(sizeof(T)), site);
  }
  void SetValue(uint64_t offset, T value, ms_twin::Site site = ms_twin::Site::Here()) const {
    ms_twin::ScalarWrite<T>("SetValue", (*this)[offset].Bytes(sizeof(T)), value, site);
  }
  template <CacheRwMode rw = CacheRwMode::RW>
  void SetL2CacheHint(CacheMode) {}

  // The region of `run` bytes at the start of the tensor.
  ms_twin::Region Bytes(int64_t run) const {
    ms_twin::Region region;
    region.memory = memory_;
    region.run = run;
    if (!memory_) return region;
    region.offset = reinterpret_cast<const uint8_t*>(pointer_) - memory_->data;
    region.begin = base_ ? reinterpret_cast<const uint8_t*>(base_) - memory_->data : 0;
    region.end = bounded_ ? region.begin + base_bytes_ : static_cast<int64_t>(memory_->bytes);
    return region;
  }

 private:
  void Find() {
    base_ = pointer_;
    base_bytes_ = static_cast<int64_t>(size_ * sizeof(T));
    memory_ = ms_twin::Twin().GlobalAt(pointer_);
  }

  T* pointer_ = nullptr;
  T* base_ = nullptr;
  int64_t base_bytes_ = 0;
  uint64_t size_ = 0;
  bool bounded_ = false;
  ms_twin::Memory* memory_ = nullptr;
};

template <class T>
class LocalTensor {
 public:
  using PrimType = T;

  LocalTensor() = default;
  LocalTensor(TPosition position, uint32_t address, uint32_t elements, ms_twin::Site site = ms_twin::Site::Here())
      : position_(position), size_(elements), address_(address), begin_(address) {
    end_ = begin_ + int64_t(elements) * int64_t(sizeof(T));
    memory_ = ms_twin::Current().MemoryOf(ms_twin::HardwareOf(position));
    const ms_twin::Site at = site;
    auto& machine = ms_twin::Twin();
    const std::string& core = ms_twin::Current().name;
    if (!memory_ || memory_->bytes == 0)
      machine.Violate(ms_twin::Fault::core, at,
                      core + " has no " + ms_twin::HardwareName(ms_twin::HardwareOf(position)));
    else if (end_ > static_cast<int64_t>(memory_->bytes))
      machine.Violate(ms_twin::Fault::capacity, at,
                      core + ms_twin::Format(": the tensor takes bytes %lld..%lld of %s, which has %lld",
                                             static_cast<long long>(begin_), static_cast<long long>(end_),
                                             memory_->name.c_str(), static_cast<long long>(memory_->bytes)));
    if (address % ms_twin::kBlock)
      machine.Violate(ms_twin::Fault::alignment, at,
                      core + ms_twin::Format(": the tensor starts at byte %u, which is no multiple of 32", address));
  }

  LocalTensor operator[](uint32_t offset) const {
    LocalTensor part = *this;
    part.address_ += int64_t(offset) * int64_t(sizeof(T));
    part.size_ = offset < size_ ? size_ - offset : 0;
    return part;
  }
  template <class U>
  LocalTensor<U> ReinterpretCast() const {
    LocalTensor<U> view;
    view.position_ = position_;
    view.size_ = static_cast<uint32_t>(uint64_t(size_) * sizeof(T) / sizeof(U));
    view.address_ = address_;
    view.begin_ = begin_;
    view.end_ = end_;
    view.memory_ = memory_;
    view.handle_ = handle_;
    return view;
  }
  T GetValue(uint32_t offset, ms_twin::Site site = ms_twin::Site::Here()) const {
    return ms_twin::ScalarRead<T>("GetValue", (*this)[offset].Bytes(sizeof(T)), site);
  }
  template <class S>
  void SetValue(uint32_t offset, S value, ms_twin::Site site = ms_twin::Site::Here()) const {
    ms_twin::ScalarWrite<T>("SetValue", (*this)[offset].Bytes(sizeof(T)), static_cast<T>(value), site);
  }
  uint32_t GetSize() const { return size_; }
  void SetSize(uint32_t elements) { size_ = elements; }
  uint32_t GetLength() const { return size_ * sizeof(T); }
  TPosition GetPosition() const { return position_; }

  ms_twin::Region Bytes(int64_t run) const {
    ms_twin::Region region;
    region.memory = memory_;
    region.offset = address_;
    region.run = run;
    region.begin = begin_;
    region.end = end_;
    return region;
  }
  Hardware GetHardware() const { return memory_ ? memory_->hardware : Hardware::MAX; }
  uint8_t* Data() const { return memory_->data + address_; }
  uint8_t* Undefined() const { return memory_->undefined ? memory_->undefined + address_ : nullptr; }
  int Handle() const { return handle_; }

  // Used by queues and allocators.
  static LocalTensor Make(TPosition position, ms_twin::Memory* memory, int64_t address, int64_t bytes, int handle) {
    LocalTensor tensor;
    tensor.position_ = position;
    tensor.memory_ = memory;
    tensor.address_ = tensor.begin_ = address;
    tensor.end_ = address + bytes;
    tensor.size_ = static_cast<uint32_t>(bytes / int64_t(sizeof(T)));
    tensor.handle_ = handle;
    return tensor;
  }

 private:
  template <class U>
  friend class LocalTensor;

  TPosition position_ = TPosition::MAX;
  uint32_t size_ = 0;
  int64_t address_ = 0, begin_ = 0, end_ = 0;
  ms_twin::Memory* memory_ = nullptr;
  int handle_ = -1;  // the queue buffer it came from
};

// Hands out addresses one after the other; nothing is ever given back.
template <Hardware hardware>
class LocalMemAllocator {
 public:
  template <class T>
  LocalTensor<T> Alloc(uint32_t elements, ms_twin::Site site = ms_twin::Site::Here()) {
    return Take<T>(Default(), elements, site);
  }
  template <class T, uint32_t elements>
  LocalTensor<T> Alloc(ms_twin::Site site = ms_twin::Site::Here()) {
    return Take<T>(Default(), elements, site);
  }
  template <TPosition position, class T>
  LocalTensor<T> Alloc(uint32_t elements, ms_twin::Site site = ms_twin::Site::Here()) {
    return Take<T>(position, elements, site);
  }
  template <TPosition position, class T, uint32_t elements>
  LocalTensor<T> Alloc(ms_twin::Site site = ms_twin::Site::Here()) {
    return Take<T>(position, elements, site);
  }
  uint32_t GetCurAddr() const { return next_; }

 private:
  static constexpr TPosition Default() {
    switch (hardware) {
      case Hardware::UB:
        return TPosition::VECCALC;
      case Hardware::L1:
        return TPosition::A1;
      case Hardware::L0A:
        return TPosition::A2;
      case Hardware::L0B:
        return TPosition::B2;
      case Hardware::L0C:
        return TPosition::CO1;
      default:
        return TPosition::MAX;
    }
  }
  template <class T>
  LocalTensor<T> Take(TPosition position, uint32_t elements, ms_twin::Site site) {
    LocalTensor<T> tensor(position, next_, elements, site);
    const uint32_t step = hardware == Hardware::L0C                              ? 1024
                          : hardware == Hardware::UB || hardware == Hardware::L1 ? 32
                                                                                 : 512;
    next_ = static_cast<uint32_t>((next_ + uint64_t(elements) * sizeof(T) + step - 1) / step * step);
    return tensor;
  }
  uint32_t next_ = 0;
};

}  // namespace AscendC
