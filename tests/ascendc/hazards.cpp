// Small kernels, right ones and wrong ones. A wrong one carries its verdict on the line that has to be named:
//   // EXPECT RAW            a violation of this kind whose own line is this one
//   // EARLIER               the other access that the message has to name
// A kernel without marks has to run without a report. The text is read by test_twin_hazards.py.
#include <cstring>
#include <map>
#include <string>

#include "kernel_operator.h"
#include "launch.h"

namespace {

using namespace AscendC;

constexpr uint32_t N = 1024;  // floats per tile
constexpr uint32_t kTile = N * sizeof(float);

struct Buffers {
  uint8_t *in, *out, *scratch;  // 256 KB each of GM; `scratch` is workspace
};

struct Kernel {
  void (*body)(Buffers);
  int blocks, vectors;  // AI cores, AIVs of each; 0: cube only
  bool cube;
};

std::map<std::string, Kernel>& Kernels() {
  static std::map<std::string, Kernel> kernels;
  return kernels;
}
struct Add_ {
  Add_(const char* name, Kernel kernel) { Kernels()[name] = kernel; }
};

// A kernel for one vector core, for one cube core, for `blocks` cores of one AIC and two AIVs.
#define VECTOR_KERNEL(name)                            \
  void name(Buffers gm);                               \
  const Add_ name##_added(#name, {name, 1, 1, false}); \
  void name([[maybe_unused]] Buffers gm)
#define CUBE_KERNEL(name)                             \
  void name(Buffers gm);                              \
  const Add_ name##_added(#name, {name, 1, 0, true}); \
  void name([[maybe_unused]] Buffers gm)
#define MIX_KERNEL(name, blocks)                           \
  void name(Buffers gm);                                   \
  const Add_ name##_added(#name, {name, blocks, 2, true}); \
  void name([[maybe_unused]] Buffers gm)

template <class T = float>
LocalTensor<T> Ub(uint32_t tile, uint32_t elements = kTile / sizeof(T)) {
  return LocalTensor<T>(TPosition::VECCALC, tile * kTile, elements);
}
template <class T = float>
GlobalTensor<T> Gm(uint8_t* address) {
  GlobalTensor<T> tensor;
  tensor.SetGlobalBuffer(reinterpret_cast<__gm__ T*>(address));
  return tensor;
}
void Load(LocalTensor<float> to, GlobalTensor<float> from) {
  DataCopy(to, from, N);
  SetFlag<HardEvent::MTE2_V>(0);
  WaitFlag<HardEvent::MTE2_V>(0);
}
void Store(GlobalTensor<float> to, LocalTensor<float> from) {
  SetFlag<HardEvent::V_MTE3>(0);
  WaitFlag<HardEvent::V_MTE3>(0);
  DataCopy(to, from, N);
}

// ---- one vector core ----

VECTOR_KERNEL(right_copy_compute_copy) {
  const auto in = Gm(gm.in), out = Gm(gm.out);
  const auto x = Ub(0), y = Ub(1);
  DataCopy(x, in, N);
  SetFlag<HardEvent::MTE2_V>(0);
  WaitFlag<HardEvent::MTE2_V>(0);
  Adds(y, x, 1.0f, N);
  SetFlag<HardEvent::V_MTE3>(0);
  WaitFlag<HardEvent::V_MTE3>(0);
  DataCopy(out, y, N);
}

VECTOR_KERNEL(right_double_buffer) {
  const auto in = Gm(gm.in), out = Gm(gm.out);
  for (int buffer = 0; buffer < 2; ++buffer) SetFlag<HardEvent::MTE3_MTE2>(buffer);
  for (int tile = 0; tile < 8; ++tile) {
    const int buffer = tile % 2;
    const auto x = Ub(buffer);
    WaitFlag<HardEvent::MTE3_MTE2>(buffer);
    DataCopy(x, in[tile * N], N);
    SetFlag<HardEvent::MTE2_V>(buffer);
    WaitFlag<HardEvent::MTE2_V>(buffer);
    Muls(x, x, 2.0f, N);
    SetFlag<HardEvent::V_MTE3>(buffer);
    WaitFlag<HardEvent::V_MTE3>(buffer);
    DataCopy(out[tile * N], x, N);
    SetFlag<HardEvent::MTE3_MTE2>(buffer);
  }
  for (int buffer = 0; buffer < 2; ++buffer) WaitFlag<HardEvent::MTE3_MTE2>(buffer);
}

VECTOR_KERNEL(right_barrier_all) {
  const auto x = Ub(0);
  DataCopy(x, Gm(gm.in), N);
  PipeBarrier<PIPE_ALL>();
  Adds(x, x, 1.0f, N);
  PipeBarrier<PIPE_ALL>();
  DataCopy(Gm(gm.out), x, N);
}

VECTOR_KERNEL(right_vector_chain) {
  const auto x = Ub(0), y = Ub(1);
  Load(x, Gm(gm.in));
  Adds(y, x, 1.0f, N);
  PipeBarrier<PIPE_V>();
  Mul(x, y, y, N);
  PipeBarrier<PIPE_V>();
  Exp(y, x, N);
  Store(Gm(gm.out), y);
}

VECTOR_KERNEL(right_disjoint_vector_work) {  // no dependence, no barrier
  const auto x = Ub(0), y = Ub(1), z = Ub(2);
  Load(x, Gm(gm.in));
  Adds(y, x, 1.0f, N);
  Muls(z, x, 2.0f, N);
  Store(Gm(gm.out), y);
  DataCopy(Gm(gm.out)[N], z, N);
}

VECTOR_KERNEL(missing_mte2_v) {
  const auto x = Ub(0), y = Ub(1);
  DataCopy(x, Gm(gm.in), N);  // EARLIER
  Adds(y, x, 1.0f, N);        // EXPECT RAW
}

VECTOR_KERNEL(missing_v_mte3) {
  const auto x = Ub(0), y = Ub(1);
  Load(x, Gm(gm.in));
  Adds(y, x, 1.0f, N);         // EARLIER
  DataCopy(Gm(gm.out), y, N);  // EXPECT RAW
}

VECTOR_KERNEL(missing_v_mte2) {
  const auto x = Ub(0), y = Ub(1);
  Load(x, Gm(gm.in));
  Adds(y, x, 1.0f, N);           // EARLIER
  DataCopy(x, Gm(gm.in)[N], N);  // EXPECT WAR|WAW
}

VECTOR_KERNEL(missing_mte3_v) {
  const auto x = Ub(0);
  Load(x, Gm(gm.in));
  Muls(x, x, 2.0f, N);
  SetFlag<HardEvent::V_MTE3>(0);
  WaitFlag<HardEvent::V_MTE3>(0);
  DataCopy(Gm(gm.out), x, N);  // EARLIER
  Duplicate(x, 0.0f, N);       // EXPECT WAR|WAW
}

VECTOR_KERNEL(missing_mte3_mte2) {
  const auto x = Ub(0);
  DataCopy(x, Gm(gm.in), N);
  SetFlag<HardEvent::MTE2_MTE3>(0);
  WaitFlag<HardEvent::MTE2_MTE3>(0);
  DataCopy(Gm(gm.out), x, N);    // EARLIER
  DataCopy(x, Gm(gm.in)[N], N);  // EXPECT WAR|WAW
}

VECTOR_KERNEL(missing_write_order_between_pipes) {
  const auto x = Ub(0);
  Duplicate(x, 0.0f, N);      // EARLIER
  DataCopy(x, Gm(gm.in), N);  // EXPECT WAW
}

VECTOR_KERNEL(missing_barrier_read) {
  const auto x = Ub(0), y = Ub(1), z = Ub(2);
  Load(x, Gm(gm.in));
  Adds(y, x, 1.0f, N);  // EARLIER
  Muls(z, y, 2.0f, N);  // EXPECT RAW
}

VECTOR_KERNEL(missing_barrier_overwrite) {
  const auto x = Ub(0), y = Ub(1);
  Load(x, Gm(gm.in));
  Adds(y, x, 1.0f, N);    // EARLIER
  Duplicate(x, 0.0f, N);  // EXPECT WAR
}

VECTOR_KERNEL(missing_barrier_write_twice) {
  const auto x = Ub(0);
  Duplicate(x, 0.0f, N);  // EARLIER
  Duplicate(x, 1.0f, N);  // EXPECT WAW
}

VECTOR_KERNEL(missing_barrier_overlap_of_one_block) {  // the last block of y is the first one of z
  const auto x = Ub(0), y = Ub(1), z = Ub(2);
  Load(x, Gm(gm.in));
  Adds(y, x, 1.0f, N);         // EARLIER
  Muls(z, y[N - 8], 2.0f, 8);  // EXPECT RAW
}

VECTOR_KERNEL(missing_mte2_barrier) {
  const auto x = Ub(0);
  DataCopy(x, Gm(gm.in), N);             // EARLIER
  DataCopy(x[N / 2], Gm(gm.in), N / 2);  // EXPECT WAW
}

VECTOR_KERNEL(right_mte2_barrier) {
  const auto x = Ub(0);
  DataCopy(x, Gm(gm.in), N);
  PipeBarrier<PIPE_MTE2>();
  DataCopy(x[N / 2], Gm(gm.in), N / 2);
}

VECTOR_KERNEL(missing_mte3_barrier) {
  const auto x = Ub(0);
  Load(x, Gm(gm.in));
  Store(Gm(gm.out), x);                // two copies to one place of GM
  DataCopy(Gm(gm.scratch), x, N);      // EARLIER
  DataCopy(Gm(gm.scratch)[64], x, N);  // EXPECT WAW
}

VECTOR_KERNEL(right_atomic_overlap) {  // sums do not mind the order
  const auto x = Ub(0);
  Duplicate(x, 0.0f, N);
  Store(Gm(gm.scratch), x);
  PipeBarrier<PIPE_MTE3>();
  SetAtomicAdd<float>();
  DataCopy(Gm(gm.scratch), x, N);
  DataCopy(Gm(gm.scratch), x, N);
  SetAtomicNone();
}

VECTOR_KERNEL(atomic_over_plain_write) {
  const auto x = Ub(0);
  Duplicate(x, 0.0f, N);
  SetFlag<HardEvent::V_MTE3>(0);
  WaitFlag<HardEvent::V_MTE3>(0);
  DataCopy(Gm(gm.scratch), x, N);  // EARLIER
  SetAtomicAdd<float>();
  DataCopy(Gm(gm.scratch), x, N);  // EXPECT WAW|RAW
  SetAtomicNone();
}

VECTOR_KERNEL(atomic_left_on) {
  const auto x = Ub(0);
  Duplicate(x, 0.0f, N);
  SetFlag<HardEvent::V_MTE3>(0);
  WaitFlag<HardEvent::V_MTE3>(0);
  SetAtomicAdd<float>();  // EXPECT atomic
  DataCopy(Gm(gm.out), x, N);
}

VECTOR_KERNEL(flag_too_early) {
  const auto x = Ub(0), y = Ub(1);
  SetFlag<HardEvent::MTE2_V>(0);
  DataCopy(x, Gm(gm.in), N);  // EARLIER
  WaitFlag<HardEvent::MTE2_V>(0);
  Adds(y, x, 1.0f, N);  // EXPECT RAW
}

VECTOR_KERNEL(wait_too_late) {
  const auto x = Ub(0), y = Ub(1);
  DataCopy(x, Gm(gm.in), N);  // EARLIER
  SetFlag<HardEvent::MTE2_V>(0);
  Adds(y, x, 1.0f, N);  // EXPECT RAW
  WaitFlag<HardEvent::MTE2_V>(0);
}

VECTOR_KERNEL(wrong_event_id) {
  const auto x = Ub(0), y = Ub(1);
  DataCopy(x, Gm(gm.in), N);
  SetFlag<HardEvent::MTE2_V>(0);
  WaitFlag<HardEvent::MTE2_V>(1);  // EXPECT flag|deadlock
  Adds(y, x, 1.0f, N);
}

VECTOR_KERNEL(wrong_pair) {
  const auto x = Ub(0), y = Ub(1);
  DataCopy(x, Gm(gm.in), N);  // EARLIER
  SetFlag<HardEvent::MTE2_MTE3>(0);
  WaitFlag<HardEvent::MTE2_MTE3>(0);
  Adds(y, x, 1.0f, N);  // EXPECT RAW
}

VECTOR_KERNEL(pair_this_core_has_not) {
  SetFlag<HardEvent::MTE1_M>(0);  // EXPECT flag
}

VECTOR_KERNEL(event_id_beyond_seven) {
  SetFlag<HardEvent::MTE2_V>(8);  // EXPECT parameter
}

VECTOR_KERNEL(set_twice) {
  SetFlag<HardEvent::MTE2_V>(3);  // EARLIER
  SetFlag<HardEvent::MTE2_V>(3);  // EXPECT flag
  WaitFlag<HardEvent::MTE2_V>(3);
}

VECTOR_KERNEL(set_without_wait) {
  DataCopy(Ub(0), Gm(gm.in), N);
  SetFlag<HardEvent::MTE2_V>(5);  // EXPECT flag
}

VECTOR_KERNEL(wait_without_set) {
  WaitFlag<HardEvent::MTE2_V>(2);  // EXPECT flag|deadlock
}

VECTOR_KERNEL(barrier_this_core_has_not) {
  PipeBarrier<PIPE_M>();  // EXPECT parameter
}

VECTOR_KERNEL(scalar_reads_vector_result) {
  const auto x = Ub(0);
  Duplicate(x, 1.0f, N);  // EARLIER
  x.GetValue(0);          // EXPECT RAW
}

VECTOR_KERNEL(right_scalar_reads_vector_result) {
  const auto x = Ub(0);
  Duplicate(x, 1.0f, N);
  SetFlag<HardEvent::V_S>(0);
  WaitFlag<HardEvent::V_S>(0);
  x.GetValue(0);
}

VECTOR_KERNEL(vector_reads_scalar_result) {
  const auto x = Ub(0), y = Ub(1);
  x.SetValue(0, 1.0f);  // EARLIER
  Adds(y, x, 1.0f, 1);  // EXPECT RAW
}

VECTOR_KERNEL(right_vector_reads_scalar_result) {
  const auto x = Ub(0), y = Ub(1);
  x.SetValue(0, 1.0f);
  SetFlag<HardEvent::S_V>(0);
  WaitFlag<HardEvent::S_V>(0);
  Adds(y, x, 1.0f, 1);
}

VECTOR_KERNEL(scalar_reads_copied_value) {
  const auto x = Ub(0);
  DataCopy(x, Gm(gm.in), N);  // EARLIER
  x.GetValue(7);              // EXPECT RAW
}

VECTOR_KERNEL(undefined_value_reaches_gm) {
  DataCopy(Gm(gm.out), Ub(0), N);  // EXPECT uninitialised
}

VECTOR_KERNEL(undefined_value_through_arithmetic) {
  const auto x = Ub(0), y = Ub(1);
  Adds(y, x, 1.0f, N);
  SetFlag<HardEvent::V_MTE3>(0);
  WaitFlag<HardEvent::V_MTE3>(0);
  DataCopy(Gm(gm.out), y, N);  // EXPECT uninitialised
}

VECTOR_KERNEL(undefined_scalar) {
  Ub(0).GetValue(3);  // EXPECT uninitialised
}

VECTOR_KERNEL(undefined_tail_of_pad) {  // 10 floats in, 16 used
  const auto x = Ub(0);
  DataCopyPad(x, Gm(gm.in), DataCopyExtParams(1, 40, 0, 0, 0), DataCopyPadExtParams<float>(false, 0, 0, 0.0f));
  SetFlag<HardEvent::MTE2_MTE3>(0);
  WaitFlag<HardEvent::MTE2_MTE3>(0);
  DataCopy(Gm(gm.out), x, 16);  // EXPECT uninitialised
}

VECTOR_KERNEL(right_tail_of_pad) {
  const auto x = Ub(0);
  DataCopyPad(x, Gm(gm.in), DataCopyExtParams(1, 40, 0, 0, 0), DataCopyPadExtParams<float>(true, 0, 6, 0.0f));
  SetFlag<HardEvent::MTE2_MTE3>(0);
  WaitFlag<HardEvent::MTE2_MTE3>(0);
  DataCopy(Gm(gm.out), x, 16);
}

VECTOR_KERNEL(masked_lanes_stay_undefined) {
  const auto x = Ub(0);
  Duplicate(x, 1.0f, 5);
  SetFlag<HardEvent::V_MTE3>(0);
  WaitFlag<HardEvent::V_MTE3>(0);
  DataCopy(Gm(gm.out), x, 8);  // EXPECT uninitialised
}

VECTOR_KERNEL(workspace_nobody_wrote) {
  const auto x = Ub(0);
  DataCopy(x, Gm(gm.scratch), N);
  SetFlag<HardEvent::MTE2_MTE3>(0);
  WaitFlag<HardEvent::MTE2_MTE3>(0);
  DataCopy(Gm(gm.out), x, N);  // EXPECT uninitialised
}

VECTOR_KERNEL(beyond_the_tensor) {
  const auto x = Ub(0, 64);
  Duplicate(x, 1.0f, 65);  // EXPECT bounds
}

VECTOR_KERNEL(beyond_ub) {
  const LocalTensor<float> x(TPosition::VECCALC, (192 << 10) - 256, 128);  // EXPECT capacity
  (void)x;
}

VECTOR_KERNEL(beyond_gm) {
  DataCopy(Ub(0), Gm(gm.in)[(256 << 10) / 4 - 8], 16);  // EXPECT bounds
}

VECTOR_KERNEL(beyond_the_global_tensor) {
  GlobalTensor<float> in;
  in.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(gm.in), 64);
  DataCopy(Ub(0), in[60], 8);  // EXPECT bounds
}

VECTOR_KERNEL(write_to_an_input) {
  const auto x = Ub(0);
  Duplicate(x, 1.0f, N);
  SetFlag<HardEvent::V_MTE3>(0);
  WaitFlag<HardEvent::V_MTE3>(0);
  DataCopy(Gm(gm.in), x, N);  // EXPECT bounds
}

VECTOR_KERNEL(allocator_runs_out) {
  LocalMemAllocator<Hardware::UB> ub;
  ub.Alloc<float>(40 << 10);
  ub.Alloc<float>(10 << 10);  // EXPECT capacity
}

VECTOR_KERNEL(unaligned_operand) {
  const auto x = Ub(0), y = Ub(1);
  Load(x, Gm(gm.in));
  Adds(y, x[1], 1.0f, 64);  // EXPECT alignment
}

VECTOR_KERNEL(cube_work_on_a_vector_core) {
  const LocalTensor<half> a(TPosition::A2, 0, 256);  // EXPECT core
  (void)a;
}

VECTOR_KERNEL(select_scratch_in_use) {
  const auto x = Ub(0), y = Ub(1);
  const LocalTensor<uint8_t> bits(TPosition::VECCALC, 2 * kTile, N / 8);
  const LocalTensor<float> top(TPosition::VECCALC, (192 << 10) - kTile, N);
  Load(x, Gm(gm.in));
  Duplicate(top, 1.0f, N);
  CompareScalar(bits, x, 0.0f, CMPMODE::GT, N);
  PipeBarrier<PIPE_V>();
  Select(y, bits, x, 0.0f, SELMODE::VSEL_TENSOR_SCALAR_MODE, N);
  PipeBarrier<PIPE_V>();
  Add(y, y, top, N);
  SetFlag<HardEvent::V_MTE3>(0);
  WaitFlag<HardEvent::V_MTE3>(0);
  DataCopy(Gm(gm.out), y, N);  // EXPECT uninitialised
}

// ---- queues ----

VECTOR_KERNEL(right_queues) {
  TPipe pipe;
  TQue<TPosition::VECIN, 2> in;
  TQue<TPosition::VECOUT, 2> out;
  pipe.InitBuffer(in, 2, kTile);
  pipe.InitBuffer(out, 2, kTile);
  for (int tile = 0; tile < 6; ++tile) {
    auto x = in.AllocTensor<float>();
    DataCopy(x, Gm(gm.in)[tile * N], N);
    in.EnQue(x);
    x = in.DeQue<float>();
    auto y = out.AllocTensor<float>();
    Adds(y, x, 1.0f, N);
    in.FreeTensor(x);
    out.EnQue(y);
    y = out.DeQue<float>();
    DataCopy(Gm(gm.out)[tile * N], y, N);
    out.FreeTensor(y);
  }
}

VECTOR_KERNEL(queue_tensor_not_enqueued) {
  TPipe pipe;
  TQue<TPosition::VECIN, 1> in;
  pipe.InitBuffer(in, 1, kTile);
  auto x = in.AllocTensor<float>();
  DataCopy(x, Gm(gm.in), N);  // EARLIER
  Adds(Ub(20), x, 1.0f, N);   // EXPECT RAW
  in.FreeTensor(x);
}

VECTOR_KERNEL(queue_tensor_not_freed) {
  TPipe pipe;
  TQue<TPosition::VECIN, 1> in;
  pipe.InitBuffer(in, 1, kTile);
  auto x = in.AllocTensor<float>();  // EXPECT queue
  (void)x;
}

VECTOR_KERNEL(queue_empty) {
  TPipe pipe;
  TQue<TPosition::VECIN, 1> in;
  pipe.InitBuffer(in, 1, kTile);
  auto x = in.DeQue<float>();  // EXPECT queue
  (void)x;
}

VECTOR_KERNEL(queue_exhausted) {
  TPipe pipe;
  TQue<TPosition::VECIN, 1> in;
  pipe.InitBuffer(in, 1, kTile);
  auto x = in.AllocTensor<float>();
  auto y = in.AllocTensor<float>();  // EXPECT queue
  in.FreeTensor(x);
  (void)y;
}

VECTOR_KERNEL(queues_too_large) {
  TPipe pipe;
  TQue<TPosition::VECIN, 2> in;
  pipe.InitBuffer(in, 2, 100 << 10);  // EXPECT capacity
}

// ---- one cube core ----

constexpr uint32_t M = 32, K = 32, C = 32;

LocalTensor<half> L1(uint32_t kilobytes) { return LocalTensor<half>(TPosition::A1, kilobytes << 10, 4096); }
LocalTensor<half> A2(uint32_t kilobytes) { return LocalTensor<half>(TPosition::A2, kilobytes << 10, 1024); }
LocalTensor<half> B2(uint32_t kilobytes) { return LocalTensor<half>(TPosition::B2, kilobytes << 10, 1024); }
LocalTensor<float> L0c(uint32_t kilobytes) { return LocalTensor<float>(TPosition::CO1, kilobytes << 10, 1024); }

Nd2NzParams Rows() {
  Nd2NzParams p;
  p.ndNum = 1;
  p.nValue = M;
  p.dValue = K;
  p.srcNdMatrixStride = 0;
  p.srcDValue = K;
  p.dstNzC0Stride = M;
  p.dstNzNStride = 1;
  p.dstNzMatrixStride = 0;
  return p;
}
LoadData2DParams Fractals() {
  LoadData2DParams p;
  p.startIndex = 0;
  p.repeatTimes = 4;
  p.srcStride = 1;
  p.dstGap = 0;
  p.ifTranspose = false;
  return p;
}
MmadParams Product(bool init = true) {
  MmadParams p;
  p.m = M;
  p.n = C;
  p.k = K;
  p.cmatrixInitVal = init;
  return p;
}
FixpipeParamsV220 Result() {
  FixpipeParamsV220 p;
  p.nSize = C;
  p.mSize = M;
  p.srcStride = M;
  p.dstStride = C;
  p.quantPre = NoQuant;
  p.reluEn = false;
  return p;
}

CUBE_KERNEL(right_product) {
  const auto in = Gm<half>(gm.in);
  DataCopy(L1(0), in, Rows());
  DataCopy(L1(8), in[M * K], Rows());
  SetFlag<HardEvent::MTE2_MTE1>(0);
  WaitFlag<HardEvent::MTE2_MTE1>(0);
  LoadData(A2(0), L1(0), Fractals());
  LoadData(B2(0), L1(8), Fractals());
  SetFlag<HardEvent::MTE1_M>(0);
  WaitFlag<HardEvent::MTE1_M>(0);
  Mmad(L0c(0), A2(0), B2(0), Product());
  SetFlag<HardEvent::M_FIX>(0);
  WaitFlag<HardEvent::M_FIX>(0);
  Fixpipe<float, float, CFG_ROW_MAJOR>(Gm(gm.out), L0c(0), Result());
}

CUBE_KERNEL(missing_mte2_mte1) {
  DataCopy(L1(0), Gm<half>(gm.in), Rows());  // EARLIER
  LoadData(A2(0), L1(0), Fractals());        // EXPECT RAW
}

// The product up to its operands in L0A and L0B.
void Operands(Buffers gm) {
  DataCopy(L1(0), Gm<half>(gm.in), Rows());
  SetFlag<HardEvent::MTE2_MTE1>(0);
  WaitFlag<HardEvent::MTE2_MTE1>(0);
  LoadData(A2(0), L1(0), Fractals());
  LoadData(B2(0), L1(0), Fractals());
}
void OperandsReady(Buffers gm) {
  Operands(gm);
  SetFlag<HardEvent::MTE1_M>(0);
  WaitFlag<HardEvent::MTE1_M>(0);
}

CUBE_KERNEL(missing_mte1_m) {
  DataCopy(L1(0), Gm<half>(gm.in), Rows());
  SetFlag<HardEvent::MTE2_MTE1>(0);
  WaitFlag<HardEvent::MTE2_MTE1>(0);
  LoadData(B2(0), L1(0), Fractals());
  SetFlag<HardEvent::MTE1_M>(0);
  WaitFlag<HardEvent::MTE1_M>(0);
  LoadData(A2(0), L1(0), Fractals());     // EARLIER
  Mmad(L0c(0), A2(0), B2(0), Product());  // EXPECT RAW
}

CUBE_KERNEL(missing_m_fix) {
  OperandsReady(gm);
  Mmad(L0c(0), A2(0), B2(0), Product());                               // EARLIER
  Fixpipe<float, float, CFG_ROW_MAJOR>(Gm(gm.out), L0c(0), Result());  // EXPECT RAW
}

CUBE_KERNEL(missing_m_mte1) {
  OperandsReady(gm);
  Mmad(L0c(0), A2(0), B2(0), Product());  // EARLIER
  LoadData(A2(0), L1(0), Fractals());     // EXPECT WAR|WAW
}

CUBE_KERNEL(missing_mte1_mte2) {
  DataCopy(L1(0), Gm<half>(gm.in), Rows());
  SetFlag<HardEvent::MTE2_MTE1>(0);
  WaitFlag<HardEvent::MTE2_MTE1>(0);
  LoadData(A2(0), L1(0), Fractals());        // EARLIER
  DataCopy(L1(0), Gm<half>(gm.in), Rows());  // EXPECT WAR|WAW
}

CUBE_KERNEL(missing_fix_m) {
  OperandsReady(gm);
  Mmad(L0c(0), A2(0), B2(0), Product());
  SetFlag<HardEvent::M_FIX>(0);
  WaitFlag<HardEvent::M_FIX>(0);
  Fixpipe<float, float, CFG_ROW_MAJOR>(Gm(gm.out), L0c(0), Result());  // EARLIER
  Mmad(L0c(0), A2(0), B2(0), Product());                               // EXPECT WAR|WAW
}

CUBE_KERNEL(missing_m_barrier) {  // (m/16)(n/16) = 4: the hardware does not order the sums
  OperandsReady(gm);
  Mmad(L0c(0), A2(0), B2(0), Product());       // EARLIER
  Mmad(L0c(0), A2(0), B2(0), Product(false));  // EXPECT RAW|WAW
}

CUBE_KERNEL(right_m_barrier) {
  OperandsReady(gm);
  Mmad(L0c(0), A2(0), B2(0), Product());
  PipeBarrier<PIPE_M>();
  Mmad(L0c(0), A2(0), B2(0), Product(false));
}

CUBE_KERNEL(right_large_sums_without_barrier) {  // 64 x 64: 16 fractals, which the hardware orders
  const LocalTensor<half> x(TPosition::A1, 0, 4096), a(TPosition::A2, 0, 4096), b(TPosition::B2, 0, 4096);
  const LocalTensor<float> c(TPosition::CO1, 0, 4096);
  DataCopy(x, Gm<half>(gm.in), 4096);
  SetFlag<HardEvent::MTE2_MTE1>(0);
  WaitFlag<HardEvent::MTE2_MTE1>(0);
  LoadData2DParams p = Fractals();
  p.repeatTimes = 16;
  LoadData(a, x, p);
  LoadData(b, x, p);
  SetFlag<HardEvent::MTE1_M>(0);
  WaitFlag<HardEvent::MTE1_M>(0);
  MmadParams product = Product();
  product.m = product.n = product.k = 64;
  Mmad(c, a, b, product);
  product.cmatrixInitVal = false;
  Mmad(c, a, b, product);
}

CUBE_KERNEL(accumulates_on_nothing) {
  OperandsReady(gm);
  Mmad(L0c(0), A2(0), B2(0), Product(false));
  SetFlag<HardEvent::M_FIX>(0);
  WaitFlag<HardEvent::M_FIX>(0);
  Fixpipe<float, float, CFG_ROW_MAJOR>(Gm(gm.out), L0c(0), Result());  // EXPECT uninitialised
}

CUBE_KERNEL(undefined_operand) {
  Mmad(L0c(0), A2(0), B2(0), Product());
  SetFlag<HardEvent::M_FIX>(0);
  WaitFlag<HardEvent::M_FIX>(0);
  Fixpipe<float, float, CFG_ROW_MAJOR>(Gm(gm.out), L0c(0), Result());  // EXPECT uninitialised
}

CUBE_KERNEL(fix_mte2_has_no_flag) {
  SetFlag<HardEvent::FIX_MTE2>(0);  // EXPECT flag
}

CUBE_KERNEL(wrong_quantisation) {
  OperandsReady(gm);
  Mmad(L0c(0), A2(0), B2(0), Product());
  SetFlag<HardEvent::M_FIX>(0);
  WaitFlag<HardEvent::M_FIX>(0);
  Fixpipe<half, float, CFG_ROW_MAJOR>(Gm<half>(gm.out), L0c(0), Result());  // EXPECT parameter
}

CUBE_KERNEL(misplaced_operand) {
  const LocalTensor<half> a(TPosition::A2, 32, 1024);
  DataCopy(L1(0), Gm<half>(gm.in), Rows());
  SetFlag<HardEvent::MTE2_MTE1>(0);
  WaitFlag<HardEvent::MTE2_MTE1>(0);
  LoadData(a, L1(0), Fractals());  // EXPECT alignment
}

CUBE_KERNEL(right_unit_flag) {  // Fixpipe follows Mmad by fractal, without M_FIX
  OperandsReady(gm);
  MmadParams product = Product();
  product.unitFlag = 3;
  FixpipeParamsV220 result = Result();
  result.unitFlag = 3;
  Mmad(L0c(0), A2(0), B2(0), product);
  Fixpipe<float, float, CFG_ROW_MAJOR>(Gm(gm.out), L0c(0), result);
}

CUBE_KERNEL(unit_flag_never_set) {
  OperandsReady(gm);
  MmadParams product = Product();
  product.unitFlag = 2;
  FixpipeParamsV220 result = Result();
  result.unitFlag = 3;
  Mmad(L0c(0), A2(0), B2(0), product);
  Fixpipe<float, float, CFG_ROW_MAJOR>(Gm(gm.out), L0c(0), result);  // EXPECT flag|deadlock|RAW
}

// ---- several cores ----

void CubeWrites(Buffers gm) {
  OperandsReady(gm);
  Mmad(L0c(0), A2(0), B2(0), Product());
  SetFlag<HardEvent::M_FIX>(0);
  WaitFlag<HardEvent::M_FIX>(0);
  Fixpipe<float, float, CFG_ROW_MAJOR>(Gm(gm.scratch), L0c(0), Result());  // the AIVs read this
}
// Half of the product to each AIV, and back.
GlobalTensor<float> Half(uint8_t* base) { return Gm(base)[GetSubBlockIdx() * 512]; }

MIX_KERNEL(right_cube_then_vector, 1) {
  if ASCEND_IS_AIC {
    CubeWrites(gm);
    CrossCoreSetFlag<2, PIPE_FIX>(1);
  }
  if ASCEND_IS_AIV {
    CrossCoreWaitFlag(1);
    DataCopy(Ub(0), Half(gm.scratch), 512);
    SetFlag<HardEvent::MTE2_MTE3>(0);
    WaitFlag<HardEvent::MTE2_MTE3>(0);
    DataCopy(Half(gm.out), Ub(0), 512);
  }
}

MIX_KERNEL(right_vector_then_cube, 1) {
  if ASCEND_IS_AIV {
    Duplicate(Ub<half>(0), half(1.0f), 512);
    SetFlag<HardEvent::V_MTE3>(0);
    WaitFlag<HardEvent::V_MTE3>(0);
    DataCopy(Gm<half>(gm.scratch)[GetSubBlockIdx() * 512], Ub<half>(0), 512);
    CrossCoreSetFlag<2, PIPE_MTE3>(2);
  }
  if ASCEND_IS_AIC {
    CrossCoreWaitFlag(2);
    DataCopy(L1(0), Gm<half>(gm.scratch), Rows());
    SetFlag<HardEvent::MTE2_MTE1>(0);
    WaitFlag<HardEvent::MTE2_MTE1>(0);
    LoadData(A2(0), L1(0), Fractals());
  }
}

MIX_KERNEL(cross_core_without_flag, 1) {
  if ASCEND_IS_AIC {
    OperandsReady(gm);
    Mmad(L0c(0), A2(0), B2(0), Product());
    SetFlag<HardEvent::M_FIX>(0);
    WaitFlag<HardEvent::M_FIX>(0);
    Fixpipe<float, float, CFG_ROW_MAJOR>(Gm(gm.scratch), L0c(0), Result());  // EXPECT WAR
  }
  if ASCEND_IS_AIV {
    DataCopy(Ub(0), Half(gm.scratch), 512);  // EXPECT RAW
  }
}

MIX_KERNEL(cross_core_flag_of_the_wrong_pipe, 1) {
  if ASCEND_IS_AIC {
    OperandsReady(gm);
    Mmad(L0c(0), A2(0), B2(0), Product());
    SetFlag<HardEvent::M_FIX>(0);
    WaitFlag<HardEvent::M_FIX>(0);
    Fixpipe<float, float, CFG_ROW_MAJOR>(Gm(gm.scratch), L0c(0), Result());  // EARLIER
    CrossCoreSetFlag<2, PIPE_MTE2>(1);
  }
  if ASCEND_IS_AIV {
    CrossCoreWaitFlag(1);
    DataCopy(Ub(0), Half(gm.scratch), 512);  // EXPECT RAW
  }
}

MIX_KERNEL(cross_core_flag_before_the_work, 1) {
  if ASCEND_IS_AIC {
    OperandsReady(gm);
    Mmad(L0c(0), A2(0), B2(0), Product());
    SetFlag<HardEvent::M_FIX>(0);
    WaitFlag<HardEvent::M_FIX>(0);
    CrossCoreSetFlag<2, PIPE_FIX>(1);
    Fixpipe<float, float, CFG_ROW_MAJOR>(Gm(gm.scratch), L0c(0), Result());  // EARLIER
  }
  if ASCEND_IS_AIV {
    CrossCoreWaitFlag(1);
    DataCopy(Ub(0), Half(gm.scratch), 512);  // EXPECT RAW
  }
}

MIX_KERNEL(cross_core_reuse_without_answer, 1) {  // the cube overwrites what the vectors may still read
  if ASCEND_IS_AIC {
    CubeWrites(gm);
    CrossCoreSetFlag<2, PIPE_FIX>(1);
    Fixpipe<float, float, CFG_ROW_MAJOR>(Gm(gm.scratch), L0c(0), Result());  // EXPECT WAW
  }
  if ASCEND_IS_AIV {
    CrossCoreWaitFlag(1);
    DataCopy(Ub(0), Half(gm.scratch), 512);  // EXPECT RAW
  }
}

MIX_KERNEL(cross_core_wait_for_ever, 1) {
  if ASCEND_IS_AIV {
    CrossCoreWaitFlag(3);  // EXPECT deadlock
  }
}

MIX_KERNEL(cross_core_one_vector_is_missing, 1) {  // the AIC passes after both
  if ASCEND_IS_AIV {
    if (GetSubBlockIdx() == 0) CrossCoreSetFlag<2, PIPE_MTE3>(3);
  }
  if ASCEND_IS_AIC {
    CrossCoreWaitFlag(3);  // EXPECT deadlock
  }
}

MIX_KERNEL(cross_core_not_waited_for, 1) {
  if ASCEND_IS_AIC {
    CrossCoreSetFlag<2, PIPE_FIX>(4);  // EXPECT flag
  }
}

MIX_KERNEL(cross_core_sixteen_sets, 1) {
  if ASCEND_IS_AIC {
    for (int i = 0; i < 16; ++i) CrossCoreSetFlag<2, PIPE_FIX>(4);  // EXPECT flag
  }
}

MIX_KERNEL(cross_core_flag_sixteen, 1) {
  if ASCEND_IS_AIC {
    CrossCoreSetFlag<2, PIPE_FIX>(16);  // EXPECT parameter
  }
}

MIX_KERNEL(cross_core_pipe_s, 1) {
  if ASCEND_IS_AIC {
    CrossCoreSetFlag<2, PIPE_S>(1);  // EXPECT parameter
  }
}

MIX_KERNEL(vectors_write_one_place, 1) {
  if ASCEND_IS_AIV {
    Duplicate(Ub(0), 1.0f, N);
    SetFlag<HardEvent::V_MTE3>(0);
    WaitFlag<HardEvent::V_MTE3>(0);
    DataCopy(Gm(gm.out), Ub(0), N);  // EXPECT WAW
  }
}

MIX_KERNEL(blocks_write_one_place, 2) {
  if ASCEND_IS_AIC {
    OperandsReady(gm);
    Mmad(L0c(0), A2(0), B2(0), Product());
    SetFlag<HardEvent::M_FIX>(0);
    WaitFlag<HardEvent::M_FIX>(0);
    Fixpipe<float, float, CFG_ROW_MAJOR>(Gm(gm.out), L0c(0), Result());  // EXPECT WAW
  }
}

MIX_KERNEL(right_blocks_apart, 2) {
  if ASCEND_IS_AIC {
    OperandsReady(gm);
    Mmad(L0c(0), A2(0), B2(0), Product());
    SetFlag<HardEvent::M_FIX>(0);
    WaitFlag<HardEvent::M_FIX>(0);
    Fixpipe<float, float, CFG_ROW_MAJOR>(Gm(gm.out)[GetBlockIdx() * 1024], L0c(0), Result());
  }
}

MIX_KERNEL(right_vectors_meet, 2) {  // every AIV reads what its neighbour wrote
  if ASCEND_IS_AIV {
    const int64_t next = (GetBlockIdx() + 1) % 4;
    Duplicate(Ub(0), 1.0f, N);
    SetFlag<HardEvent::V_MTE3>(0);
    WaitFlag<HardEvent::V_MTE3>(0);
    DataCopy(Gm(gm.scratch)[GetBlockIdx() * N], Ub(0), N);
    SyncAll<true>();
    DataCopy(Ub(1), Gm(gm.scratch)[next * N], N);
  }
}

MIX_KERNEL(vectors_do_not_meet, 2) {
  if ASCEND_IS_AIV {
    const int64_t next = (GetBlockIdx() + 3) % 4;
    Duplicate(Ub(0), 1.0f, N);
    SetFlag<HardEvent::V_MTE3>(0);
    WaitFlag<HardEvent::V_MTE3>(0);
    DataCopy(Gm(gm.scratch)[GetBlockIdx() * N], Ub(0), N);  // EXPECT WAR
    DataCopy(Ub(1), Gm(gm.scratch)[next * N], N);           // EXPECT RAW
  }
}

MIX_KERNEL(right_vectors_of_a_core_meet, 1) {  // mode 1
  if ASCEND_IS_AIV {
    Duplicate(Ub(0), 1.0f, N);
    SetFlag<HardEvent::V_MTE3>(0);
    WaitFlag<HardEvent::V_MTE3>(0);
    DataCopy(Gm(gm.scratch)[GetSubBlockIdx() * N], Ub(0), N);
    CrossCoreSetFlag<1, PIPE_MTE3>(5);
    CrossCoreWaitFlag(5);
    DataCopy(Ub(1), Gm(gm.scratch)[(1 - GetSubBlockIdx()) * N], N);
  }
}

MIX_KERNEL(right_all_meet, 2) {
  if ASCEND_IS_AIC {
    OperandsReady(gm);
    Mmad(L0c(0), A2(0), B2(0), Product());
    SetFlag<HardEvent::M_FIX>(0);
    WaitFlag<HardEvent::M_FIX>(0);
    Fixpipe<float, float, CFG_ROW_MAJOR>(Gm(gm.scratch)[GetBlockIdx() * 1024], L0c(0), Result());
    SyncAll<false>();
  }
  if ASCEND_IS_AIV {
    SyncAll<false>();
    DataCopy(Ub(0), Gm(gm.scratch)[(3 - GetBlockIdx()) * 512], 512);
  }
}

MIX_KERNEL(one_core_does_not_meet, 2) {
  if ASCEND_IS_AIV {
    if (GetBlockIdx() != 2) SyncAll<true>();  // EXPECT deadlock
  }
}

}  // namespace

// Runs kernel `name`. Returns the number of kinds of violations, or -1 for an unknown name; `report` receives a line
// for each: "fault|file|line|other line|text".
extern "C" int64_t RunKernel(const char* name, int64_t reverse, char* report, uint64_t report_bytes) {
  const auto found = Kernels().find(name);
  if (found == Kernels().end()) return -1;
  const Kernel& kernel = found->second;
  constexpr size_t kBytes = 256 << 10;
  std::string in(kBytes, '\0'), out(kBytes, '\0');
  ms_twin::Options options;
  options.blocks = kernel.blocks;
  options.aiv_per_block = kernel.vectors;
  options.has_aic = kernel.cube;
  options.reverse_order = reverse != 0;
  ms_twin::Launch launch(options);
  Buffers gm;
  gm.in = launch.Input(&in[0], kBytes, "in");
  gm.out = launch.Output(&out[0], kBytes, "out");
  gm.scratch = GetUserWorkspace(launch.Workspace(kBytes));
  const ms_twin::Report result = launch.Run([&] { kernel.body(gm); });
  std::string lines;
  for (const ms_twin::Violation& violation : result.violations)
    lines += std::string(ms_twin::FaultName(violation.fault)) + "|" + violation.file + "|" +
             std::to_string(violation.line) + "|" + std::to_string(violation.other_line) + "|" + violation.text + "\n";
  std::strncpy(report, lines.c_str(), report_bytes - 1);
  report[report_bytes - 1] = '\0';
  return static_cast<int64_t>(result.violations.size());
}
