#include "shared.cuh"

namespace hot {

void quantize_shared_fp16(const SharedTask& task) { launch_shared<__half>(task); }

}  // namespace hot
