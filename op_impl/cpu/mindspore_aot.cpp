// The CPU library's ops for MindSpore.
#include "cpu/mindspore_aot.h"

static constexpr Library kCpu{msflash_cpu_call, msflash_cpu_infer, msflash_cpu_present_inputs, msflash_cpu_last_error};

MSF_AOT_OP(kCpu, MsFlashFwd, "fwd")
MSF_AOT_OP(kCpu, MsFlashBwd, "bwd")
MSF_AOT_OP(kCpu, MsFlashBiasGrad, "bias_grad")
MSF_AOT_OP(kCpu, MsFlashMhaFwd, "mha_fwd")
MSF_AOT_OP(kCpu, MsFlashMhaBwd, "mha_bwd")
MSF_AOT_OP(kCpu, MsFlashMhaBiasGrad, "mha_bias_grad")
MSF_AOT_OP(kCpu, MsFlashKvCache, "kvcache")
MSF_AOT_OP(kCpu, MsFlashMerge, "merge")
MSF_AOT_OP(kCpu, MsFlashAddress, "address")
