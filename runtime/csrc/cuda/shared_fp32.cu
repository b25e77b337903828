#include "shared.cuh"

namespace hot {

void quantize_shared_fp32(const SharedTask& task) { launch_shared<float>(task); }

}  // namespace hot
