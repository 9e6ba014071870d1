// TPipe, TQue, TQueBind, TBuf: buffers that carry their own events. EnQue sets the producer's event, DeQue waits for
// it; FreeTensor sets the consumer's, the next AllocTensor of the buffer waits for it. The events come from the pipe's
// pool of 8 per pair of pipes.
#pragma once
#include <deque>
#include <exception>
#include <memory>
#include <vector>

#include "sync.h"
#include "tensor.h"

namespace AscendC {
class TPipe;
}

namespace ms_twin {

// The pipe that fills a buffer and the one that empties it.
struct QueuePipes {
  pipe_t producer, consumer;
};

constexpr QueuePipes PipesOf(AscendC::TPosition source, AscendC::TPosition target) {
  using AscendC::TPosition;
  const bool from_gm = source == TPosition::GM, to_gm = target == TPosition::GM;
  if (target == TPosition::VECIN && from_gm) return {PIPE_MTE2, PIPE_V};
  if (source == TPosition::VECOUT && to_gm) return {PIPE_V, PIPE_MTE3};
  if (source == TPosition::VECIN && target == TPosition::VECOUT) return {PIPE_MTE2, PIPE_MTE3};
  if (from_gm && (target == TPosition::A1 || target == TPosition::B1 || target == TPosition::C1))
    return {PIPE_MTE2, PIPE_MTE1};
  if (target == TPosition::A2 || target == TPosition::B2 || target == TPosition::C2) return {PIPE_MTE1, PIPE_M};
  if (source == TPosition::CO1) return {PIPE_M, PIPE_FIX};
  return {PIPE_V, PIPE_V};  // VECCALC: a barrier instead of events
}

struct QueueBuffer {
  enum State { kIdle, kAllocated, kQueued, kTaken } state = kIdle;
  int64_t address = 0, bytes = 0;
  int32_t enqueue_id = -1, free_id = -1;
  Site site;  // of the last call that changed the state
};

inline void QueueFault(Site site, const std::string& what) {
  Twin().Violate(Fault::queue, site, Current().name + ", " + what);
}

// What a queue holds. The pipe owns it together with the queue, because either may be destroyed first.
struct QueueState {
  std::vector<QueueBuffer> buffers;
  std::deque<size_t> queued;
  size_t next = 0;
  int free_event = 0;
};

}  // namespace ms_twin

namespace AscendC {

template <TPosition position>
class TBuf;

class TPipe {
 public:
  TPipe() { Active() = this; }
  TPipe(const TPipe&) = delete;
  TPipe& operator=(const TPipe&) = delete;
  ~TPipe() {
    if (!ms_twin::Twin().aborting && std::uncaught_exceptions() == 0) Destroy();
    if (Active() == this) Active() = nullptr;
  }

  template <class Queue>
  bool InitBuffer(Queue& queue, const ms_twin::U8 number, uint32_t bytes, ms_twin::Site site = ms_twin::Site::Here()) {
    if (number < 1 || number > 16) ms_twin::QueueFault(site, "InitBuffer: the number of buffers is not within 1..16");
    for (int64_t i = 0; i < number; ++i) {
      const int64_t address = Take(Queue::kHardware, bytes, site);
      queue.AddBuffer(address, Rounded(bytes));
    }
    queue.Attach(this);
    queues_.push_back(queue.State());
    return true;
  }
  template <TPosition position>
  bool InitBuffer(TBuf<position>& buffer, uint32_t bytes, ms_twin::Site site = ms_twin::Site::Here()) {
    buffer.Set(Take(ms_twin::HardwareOf(position), bytes, site), Rounded(bytes));
    return true;
  }

  template <HardEvent event>
  TEventID AllocEventID(ms_twin::Site site = ms_twin::Site::Here()) {
    return AllocEvent(static_cast<int>(event), site);
  }
  template <HardEvent event>
  void ReleaseEventID(TEventID id, ms_twin::Site site = ms_twin::Site::Here()) {
    ReleaseEvent(static_cast<int>(event), id, site);
  }
  TEventID FetchEventID(HardEvent event, ms_twin::Site site = ms_twin::Site::Here()) {
    const int number = static_cast<int>(event);
    for (int id = 0; id < ms_twin::kEventIds; ++id)
      if (!used_[number][id]) return static_cast<TEventID>(id);
    ms_twin::QueueFault(site, "FetchEventID: all 8 ids of this event are in use");
    return 0;
  }
  template <HardEvent event>
  TEventID FetchEventID(ms_twin::Site site = ms_twin::Site::Here()) {
    return FetchEventID(event, site);
  }

  void Reset(ms_twin::Site site = ms_twin::Site::Here()) {
    for (auto& queue : queues_) Finish(*queue, site);
    queues_.clear();
    for (int64_t& next : next_) next = 0;
  }
  void Destroy(ms_twin::Site site = ms_twin::Site::Here()) {
    Reset(site);
    ms_twin::Barrier(PIPE_ALL, site);
  }
  void Init() {}

  TEventID AllocEvent(int event, ms_twin::Site site) {
    for (int id = 0; id < ms_twin::kEventIds; ++id)
      if (!used_[event][id]) {
        used_[event][id] = true;
        return static_cast<TEventID>(id);
      }
    ms_twin::QueueFault(site, "all 8 ids of an event are in use");
    return 0;
  }
  void ReleaseEvent(int event, int32_t id, ms_twin::Site site) {
    if (id < 0 || id >= ms_twin::kEventIds || !used_[event][id])
      return ms_twin::QueueFault(site, "ReleaseEventID: the id was not allocated");
    used_[event][id] = false;
  }

  // Before a freed buffer is filled again.
  void WaitFreed(const ms_twin::QueueState& queue, ms_twin::QueueBuffer& buffer, ms_twin::Site site) {
    if (buffer.free_id < 0) return;
    ms_twin::WaitEvent(queue.free_event, buffer.free_id, site);
    ReleaseEvent(queue.free_event, buffer.free_id, site);
    buffer.free_id = -1;
  }

  static TPipe*& Active() { return reinterpret_cast<TPipe*&>(ms_twin::Current().pipe); }

 private:
  static int64_t Rounded(int64_t bytes) { return (bytes + ms_twin::kBlock - 1) / ms_twin::kBlock * ms_twin::kBlock; }
  int64_t Take(Hardware hardware, int64_t bytes, ms_twin::Site site) {
    int64_t& next = next_[static_cast<int>(hardware)];
    const int64_t align = hardware == Hardware::L0A || hardware == Hardware::L0B ? 512
                          : hardware == Hardware::L0C                            ? 1024
                                                                                 : ms_twin::kBlock;
    const int64_t address = (next + align - 1) / align * align;
    next = address + Rounded(bytes);
    const ms_twin::Memory* memory = ms_twin::Current().MemoryOf(hardware);
    const int64_t room = memory ? static_cast<int64_t>(memory->bytes) : 0;
    if (next > room)
      ms_twin::Twin().Violate(
          ms_twin::Fault::capacity, site,
          ms_twin::Current().name + ms_twin::Format(", InitBuffer: %lld bytes of %s are taken, it has %lld",
                                                    static_cast<long long>(next), ms_twin::HardwareName(hardware),
                                                    static_cast<long long>(room)));
    return address;
  }

  void Finish(ms_twin::QueueState& queue, ms_twin::Site site) {
    for (size_t index : queue.queued)
      ms_twin::QueueFault(queue.buffers[index].site, "a tensor is still in a queue at the end");
    for (auto& buffer : queue.buffers) {
      if (buffer.state == ms_twin::QueueBuffer::kAllocated || buffer.state == ms_twin::QueueBuffer::kTaken)
        ms_twin::QueueFault(buffer.site, "a tensor of a queue was not freed at the end");
      WaitFreed(queue, buffer, site);
    }
    queue.buffers.clear();
    queue.queued.clear();
  }

  std::vector<std::shared_ptr<ms_twin::QueueState>> queues_;
  int64_t next_[8] = {};
  bool used_[64][ms_twin::kEventIds] = {};
};

inline TPipe* GetTPipePtr() { return TPipe::Active(); }

template <TPosition src, TPosition dst, int32_t depth, auto mask = 0>
class TQueBind {
 public:
  static constexpr TPosition kPosition = src == TPosition::GM ? dst : src;
  static constexpr Hardware kHardware =
      kPosition == TPosition::VECIN || kPosition == TPosition::VECOUT || kPosition == TPosition::VECCALC ? Hardware::UB
      : kPosition == TPosition::A2                                                                       ? Hardware::L0A
      : kPosition == TPosition::B2                                                                       ? Hardware::L0B
      : kPosition == TPosition::CO1                                                                      ? Hardware::L0C
      : kPosition == TPosition::C2 ? Hardware::BIAS
                                   : Hardware::L1;

  template <class T>
  LocalTensor<T> AllocTensor(ms_twin::Site site = ms_twin::Site::Here()) {
    for (size_t tried = 0; tried < state_->buffers.size(); ++tried) {
      const size_t index = (state_->next + tried) % state_->buffers.size();
      ms_twin::QueueBuffer& buffer = state_->buffers[index];
      if (buffer.state != ms_twin::QueueBuffer::kIdle) continue;
      state_->next = index + 1;
      pipe_->WaitFreed(*state_, buffer, site);
      buffer.state = ms_twin::QueueBuffer::kAllocated;
      buffer.site = site;
      Poison(buffer);
      return Tensor<T>(index);
    }
    ms_twin::QueueFault(
        site, ms_twin::Format("AllocTensor: all %d buffers are in use", static_cast<int>(state_->buffers.size())));
    throw ms_twin::KernelAborted();
  }

  template <class T>
  void FreeTensor(LocalTensor<T>& tensor, ms_twin::Site site = ms_twin::Site::Here()) {
    ms_twin::QueueBuffer* buffer = Of(tensor);
    if (!buffer || buffer->state == ms_twin::QueueBuffer::kIdle || buffer->state == ms_twin::QueueBuffer::kQueued)
      return ms_twin::QueueFault(site, "FreeTensor: the tensor is not taken from this queue");
    buffer->state = ms_twin::QueueBuffer::kIdle;
    if (!kEvents) return;
    buffer->free_id = pipe_->AllocEvent(kFree, site);
    ms_twin::SetEvent(kFree, buffer->free_id, site);
  }

  template <class T>
  bool EnQue(const LocalTensor<T>& tensor, ms_twin::Site site = ms_twin::Site::Here()) {
    ms_twin::QueueBuffer* buffer = Of(tensor);
    if (!buffer ||
        (buffer->state != ms_twin::QueueBuffer::kAllocated && buffer->state != ms_twin::QueueBuffer::kTaken)) {
      ms_twin::QueueFault(site, "EnQue: the tensor was not allocated from this queue");
      return false;
    }
    if (static_cast<int32_t>(state_->queued.size()) >= (depth < 1 ? 1 : depth) &&
        state_->queued.size() >= state_->buffers.size()) {
      ms_twin::QueueFault(site, "EnQue: the queue is full");
      return false;
    }
    buffer->state = ms_twin::QueueBuffer::kQueued;
    buffer->site = site;
    if (kEvents) {
      buffer->enqueue_id = pipe_->AllocEvent(kFilled, site);
      ms_twin::SetEvent(kFilled, buffer->enqueue_id, site);
    }
    state_->queued.push_back(static_cast<size_t>(buffer - state_->buffers.data()));
    return true;
  }

  template <class T>
  LocalTensor<T> DeQue(ms_twin::Site site = ms_twin::Site::Here()) {
    if (state_->queued.empty()) {
      ms_twin::QueueFault(site, "DeQue: nothing is in the queue");
      throw ms_twin::KernelAborted();
    }
    const size_t index = state_->queued.front();
    state_->queued.pop_front();
    ms_twin::QueueBuffer& buffer = state_->buffers[index];
    buffer.state = ms_twin::QueueBuffer::kTaken;
    buffer.site = site;
    if (kEvents) {
      ms_twin::WaitEvent(kFilled, buffer.enqueue_id, site);
      pipe_->ReleaseEvent(kFilled, buffer.enqueue_id, site);
      buffer.enqueue_id = -1;
    } else {
      ms_twin::Barrier(PIPE_V, site);
    }
    return Tensor<T>(index);
  }

  bool HasTensorInQue() const { return !state_->queued.empty(); }
  int32_t GetTensorCountInQue() const { return static_cast<int32_t>(state_->queued.size()); }
  bool VacantInQue() const { return state_->queued.size() < state_->buffers.size(); }
  bool HasIdleBuffer() const {
    for (const auto& buffer : state_->buffers)
      if (buffer.state == ms_twin::QueueBuffer::kIdle) return true;
    return false;
  }
  void FreeAllEvent(ms_twin::Site site = ms_twin::Site::Here()) {
    for (auto& buffer : state_->buffers) pipe_->WaitFreed(*state_, buffer, site);
  }

  // Used by TPipe.
  void AddBuffer(int64_t address, int64_t bytes) {
    state_->buffers.push_back({});
    state_->buffers.back().address = address;
    state_->buffers.back().bytes = bytes;
  }
  void Attach(TPipe* pipe) {
    pipe_ = pipe;
    state_->free_event = kFree;
  }
  const std::shared_ptr<ms_twin::QueueState>& State() const { return state_; }

 private:
  static constexpr ms_twin::QueuePipes kPipes = ms_twin::PipesOf(src, dst);
  static constexpr bool kEvents = kPipes.producer != kPipes.consumer;
  static constexpr int kFilled = ms_twin::EventOf(kPipes.producer, kPipes.consumer);
  static constexpr int kFree = ms_twin::EventOf(kPipes.consumer, kPipes.producer);

  template <class T>
  LocalTensor<T> Tensor(size_t index) {
    return LocalTensor<T>::Make(kPosition, ms_twin::Current().MemoryOf(kHardware), state_->buffers[index].address,
                                state_->buffers[index].bytes, static_cast<int>(index));
  }
  template <class T>
  ms_twin::QueueBuffer* Of(const LocalTensor<T>& tensor) {
    const int handle = tensor.Handle();
    if (handle < 0 || handle >= static_cast<int>(state_->buffers.size())) return nullptr;
    return tensor.Bytes(0).begin == state_->buffers[handle].address && tensor.GetHardware() == kHardware
               ? &state_->buffers[handle]
               : nullptr;
  }
  // A fresh tensor holds nothing to rely on.
  void Poison(const ms_twin::QueueBuffer& buffer) {
    ms_twin::Memory* memory = ms_twin::Current().MemoryOf(kHardware);
    if (memory->undefined && buffer.address + buffer.bytes <= static_cast<int64_t>(memory->bytes))
      std::memset(memory->undefined + buffer.address, 1, static_cast<size_t>(buffer.bytes));
  }

  TPipe* pipe_ = nullptr;
  std::shared_ptr<ms_twin::QueueState> state_ = std::make_shared<ms_twin::QueueState>();
};

namespace Detail {
constexpr TPosition SourceOf(TPosition position) {
  return position == TPosition::VECOUT || position == TPosition::CO1 || position == TPosition::VECCALC ? position
         : position == TPosition::A2                                                                   ? TPosition::A1
         : position == TPosition::B2                                                                   ? TPosition::B1
         : position == TPosition::C2                                                                   ? TPosition::C1
                                                                                                       : TPosition::GM;
}
constexpr TPosition TargetOf(TPosition position) {
  return position == TPosition::VECOUT ? TPosition::GM : position == TPosition::CO1 ? TPosition::CO2 : position;
}
}  // namespace Detail

template <TPosition position, int32_t depth, auto mask = 0>
class TQue : public TQueBind<Detail::SourceOf(position), Detail::TargetOf(position), depth, mask> {};

template <TPosition position = TPosition::LCM>
class TBuf {
 public:
  template <class T>
  LocalTensor<T> Get() const {
    return View<T>(0, bytes_);
  }
  template <class T>
  LocalTensor<T> Get(uint32_t elements, ms_twin::Site site = ms_twin::Site::Here()) const {
    return GetWithOffset<T>(elements, 0, site);
  }
  template <class T>
  LocalTensor<T> GetWithOffset(uint32_t elements, uint32_t offset, ms_twin::Site site = ms_twin::Site::Here()) const {
    const int64_t bytes = int64_t(elements) * int64_t(sizeof(T));
    if (offset + bytes > bytes_)
      ms_twin::Twin().Violate(ms_twin::Fault::capacity, site,
                              ms_twin::Current().name + ", TBuf: more is taken than the buffer has");
    return View<T>(offset, std::min(bytes, bytes_ - offset));
  }
  void Set(int64_t address, int64_t bytes) {
    address_ = address;
    bytes_ = bytes;
  }

 private:
  template <class T>
  LocalTensor<T> View(int64_t offset, int64_t bytes) const {
    return LocalTensor<T>::Make(position, ms_twin::Current().MemoryOf(ms_twin::HardwareOf(position)), address_ + offset,
                                bytes, -1);
  }
  int64_t address_ = 0, bytes_ = 0;
};

}  // namespace AscendC
