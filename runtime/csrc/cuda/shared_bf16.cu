#include "shared.cuh"

namespace hot {

void quantize_shared_bf16(const SharedTask& task) { launch_shared<__nv_bfloat16>(task); }

}  // namespace hot
