// The twin's ops for MindSpore.
#include "ascendc/twin_lib/api.h"
#include "cpu/mindspore_aot.h"

static constexpr Library kTwin{msflash_ascend_call, msflash_ascend_infer, msflash_ascend_present_inputs,
                               msflash_ascend_last_error};

MSF_AOT_OP(kTwin, MsFlashFwd, "fwd")
MSF_AOT_OP(kTwin, MsFlashBwd, "bwd")
MSF_AOT_OP(kTwin, MsFlashBiasGrad, "bias_grad")
MSF_AOT_OP(kTwin, MsFlashMhaFwd, "mha_fwd")
MSF_AOT_OP(kTwin, MsFlashMhaBwd, "mha_bwd")
MSF_AOT_OP(kTwin, MsFlashMhaBiasGrad, "mha_bias_grad")
MSF_AOT_OP(kTwin, MsFlashKvCache, "kvcache")
MSF_AOT_OP(kTwin, MsFlashMerge, "merge")
MSF_AOT_OP(kTwin, MsFlashAddress, "address")
