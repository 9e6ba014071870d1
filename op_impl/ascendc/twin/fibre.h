// One fibre per core. A core runs until it must wait for another one; then the next core runs. The order is always the
// same, so a launch is deterministic.
#pragma once
#include <ucontext.h>

#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <utility>

namespace ms_twin {

class Fibre {
 public:
  static constexpr size_t kStackBytes = 512 << 10;

  explicit Fibre(std::function<void()> body) : body_(std::move(body)), stack_(new char[kStackBytes]) {
    getcontext(&context_);
    context_.uc_stack.ss_sp = stack_.get();
    context_.uc_stack.ss_size = kStackBytes;
    context_.uc_link = &caller_;
    const auto self = reinterpret_cast<uintptr_t>(this);
    makecontext(&context_, reinterpret_cast<void (*)()>(&Fibre::Start), 2, static_cast<unsigned>(self >> 32),
                static_cast<unsigned>(self & 0xffffffffu));
  }
  Fibre(const Fibre&) = delete;
  Fibre& operator=(const Fibre&) = delete;

  bool done() const { return done_; }
  // Runs until the body yields or ends; what the body threw comes out here.
  void Resume() {
    swapcontext(&caller_, &context_);
    if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
  }
  // Called inside the body.
  void Yield() { swapcontext(&context_, &caller_); }

 private:
  static void Start(unsigned high, unsigned low) {
    auto* self = reinterpret_cast<Fibre*>((uintptr_t(high) << 32) | low);
    try {
      self->body_();
    } catch (...) {
      self->error_ = std::current_exception();
    }
    self->done_ = true;
  }

  std::function<void()> body_;
  std::unique_ptr<char[]> stack_;
  ucontext_t context_, caller_;
  std::exception_ptr error_;
  bool done_ = false;
};

}  // namespace ms_twin
