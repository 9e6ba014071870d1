// Keywords and macros of a kernel's source. On the device the two kinds of core are compiled apart and ASCEND_IS_AIC is
// known at compile time; here it is asked at run time.
#pragma once
#include <cstring>

#include "machine.h"

#define __global__
#define __aicore__
#define __gm__
#define __ubuf__
#define __cbuf__
#define __mix__(cube, vector)
#define __cube__
#define __vector__
#define GM_ADDR uint8_t*

#define ASCEND_IS_AIC (::ms_twin::Current().kind == ::ms_twin::CoreKind::aic)
#define ASCEND_IS_AIV (::ms_twin::Current().kind == ::ms_twin::CoreKind::aiv)

// The launch says which cores there are (Options); the macro of the device names the same thing to the compiler.
#define KERNEL_TASK_TYPE_DEFAULT(type)
#define KERNEL_TASK_TYPE(key, type)

#define REGISTER_NONE_TILING
#define REGISTER_TILING_DEFAULT(Struct) using MsTwinTilingStruct [[maybe_unused]] = Struct
#define GET_TILING_DATA(name, pointer) GET_TILING_DATA_WITH_STRUCT(MsTwinTilingStruct, name, pointer)
#define GET_TILING_DATA_WITH_STRUCT(Struct, name, pointer) \
  Struct name;                                             \
  std::memcpy(static_cast<void*>(&name), (pointer), sizeof(Struct))
#define TILING_KEY_IS(key) (::ms_twin::Twin().options.tiling_key == (key))

namespace AscendC {

// As on the device: the first 16 MiB belong to the system.
inline uint8_t* GetUserWorkspace(uint8_t* workspace) { return workspace + ms_twin::kReservedWorkspace; }

}  // namespace AscendC
