#!/bin/bash
# Builds the operator package vendors/ms_flash. Needs CANN 9 or newer, its environment set by set_env.sh.
#
#   op_impl/ascendc/build.sh [PRESET]                   # default, source-only; see CMakePresets.json
#   op_impl/ascendc/build_out/custom_opp_*.run          # installs it into CANN, or with --install-path=FOLDER elsewhere
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cann=${ASCEND_HOME_PATH:-${ASCEND_TOOLKIT_HOME:-}}
if [ -z "$cann" ]; then
  echo "build.sh: CANN is not there: neither ASCEND_HOME_PATH nor ASCEND_TOOLKIT_HOME is set." >&2
  echo "Hint: source /usr/local/Ascend/cann/set_env.sh" >&2
  exit 1
fi
cd "$here"
cmake --preset "${1:-default}" -DASCEND_CANN_PACKAGE_PATH="$cann"
cmake --build build_out --target binary --parallel "$(nproc)"
cmake --build build_out --target package
ls build_out/custom_opp_*.run
