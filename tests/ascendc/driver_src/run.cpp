// Runs a call on memories that the caller gives, and takes them back.
#include <algorithm>
#include <iterator>

#include "call.h"

namespace driver {

void Call::Run() const {
  const std::string& op = S("op");
  if (op == "Cast") return Convert();
  if (Moves(op) || Cube(op) || Vector(op) || Fill(op) || Choice(op) || Reductions(op)) return;
  throw std::invalid_argument("driver: no instruction " + op);
}

namespace {

// Gives the current core's memories the caller's content, all of it defined, or takes it back.
class Image {
 public:
  explicit Image(const Memories& memories)
      : parts_{{Hardware::UB, memories.ub, 192 << 10},   {Hardware::L1, memories.l1, 512 << 10},
               {Hardware::L0A, memories.l0a, 64 << 10},  {Hardware::L0B, memories.l0b, 64 << 10},
               {Hardware::L0C, memories.l0c, 128 << 10}, {Hardware::BIAS, memories.bt, 1 << 10}} {}
  void Load() const {
    for (const Part& part : parts_)
      if (ms_twin::Memory* memory = Of(part)) {
        std::memcpy(memory->data, part.bytes, part.size);
        if (memory->undefined) std::memset(memory->undefined, 0, part.size);
      }
  }
  void Store() const {
    for (const Part& part : parts_)
      if (ms_twin::Memory* memory = Of(part)) std::memcpy(part.bytes, memory->data, part.size);
  }

 private:
  struct Part {
    Hardware hardware;
    uint8_t* bytes;
    size_t size;
  };
  static ms_twin::Memory* Of(const Part& part) {
    ms_twin::Memory* memory = part.bytes ? ms_twin::Current().MemoryOf(part.hardware) : nullptr;
    return memory && memory->data ? memory : nullptr;
  }
  Part parts_[6];
};

}  // namespace

// Runs the call on one core, an AIC or an AIV as `core` says. Returns the number of kinds of violations; `report`
// receives a line for each, "fault|file|line|text", or, with -1, the driver's own complaint. `cycles`: what the model
// says, at its fast and at its slow end.
extern "C" int64_t RunInstruction(const char* text, const Memories* memories, char* report, uint64_t report_bytes,
                                  double* cycles) {
  std::string lines;
  int64_t count = -1;
  try {
    const Arguments arguments(text);
    ms_twin::Options options;
    options.has_aic = arguments.Text("core") == "AIC";
    options.aiv_per_block = 0;
    ms_twin::Launch launch(options);
    launch.InOut(memories->gm, memories->gm_bytes, "gm");
    std::string complaint;
    const ms_twin::Report result = launch.Run([&] {
      const Image image(*memories);
      image.Load();
      try {
        Call(arguments, *memories).Run();
      } catch (const std::exception& error) {  // an exception may not leave the fibre
        complaint = error.what();
      }
      image.Store();
    });
    if (!complaint.empty()) throw std::invalid_argument(complaint);
    for (const ms_twin::Violation& violation : result.violations)
      lines += std::string(ms_twin::FaultName(violation.fault)) + "|" + violation.file + "|" +
               std::to_string(violation.line) + "|" + violation.text + "\n";
    std::copy(std::begin(result.cycles), std::end(result.cycles), cycles);
    count = static_cast<int64_t>(result.violations.size());
  } catch (const std::exception& error) {
    lines = error.what();
  }
  std::strncpy(report, lines.c_str(), report_bytes - 1);
  report[report_bytes - 1] = '\0';
  return count;
}

}  // namespace driver
