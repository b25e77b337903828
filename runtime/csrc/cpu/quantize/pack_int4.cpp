// INT4 operands of the product, two values a byte. Nothing on a CPU multiplies them faster than
// INT8: this is here so that every provider computes every operator.
#include "cpu/common/ops.hpp"

namespace hot::cpu {

Tensor pack_int4(const Tensor& q, int64_t bits, const char* op) {
  HOT_CHECK(bits <= 4, op, "expected at most 4 bits with packed=True; got ", bits);
  const int64_t rows = q.size(0), bytes = q.size(1) / 2;
  Tensor packed = empty_cpu({rows, bytes}, aoti_torch_dtype_uint8());
  const int8_t* from = data<int8_t>(q);
  uint8_t* to = data<uint8_t>(packed);
  torch::stable::parallel_for(0, rows, grain(bytes), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin * bytes; i < end * bytes; ++i)
      to[i] = static_cast<uint8_t>((from[2 * i] & 15) | (from[2 * i + 1] & 15) << 4);
  });
  return packed;
}

Tensor unpack_int4(const Tensor& packed) {
  const int64_t rows = packed.size(0), bytes = packed.size(1);
  Tensor q = empty_cpu({rows, 2 * bytes}, aoti_torch_dtype_int8());
  const uint8_t* from = data<uint8_t>(packed);
  int8_t* to = data<int8_t>(q);
  torch::stable::parallel_for(0, rows, grain(bytes), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin * bytes; i < end * bytes; ++i) {
      to[2 * i] = static_cast<int8_t>(((from[i] & 15) ^ 8) - 8);
      to[2 * i + 1] = static_cast<int8_t>(((from[i] >> 4) ^ 8) - 8);
    }
  });
  return q;
}

}  // namespace hot::cpu
