// Host side of scaled_int_mm, add_scaled_int_mm and hadamard_int_mm: operands, the choice of
// kernel, split K.
#include <torch/csrc/stable/library.h>

#include <optional>

#include "cuda/common/device.hpp"
#include "cuda/common/numeric.cuh"
#include "cuda/common/tensors.hpp"
#include "cuda/gemm/combine.hpp"
#include "cuda/gemm/gemm.hpp"
#include "cuda/gemm/plan.hpp"

namespace hot {
namespace {

OutType out_type(ScalarType dtype) {
  if (dtype == ScalarType::BFloat16) return OutType::kBf16;
  if (dtype == ScalarType::Half) return OutType::kFp16;
  STD_TORCH_CHECK(dtype == ScalarType::Float, "hot::scaled_int_mm: out_dtype number ",
                  static_cast<int>(dtype), ", expected bfloat16, float16 or float32");
  return OutType::kFp32;
}

// An int8 operand, or one of packed INT4, as the kernels need it: k contiguous, rows on 16 bytes.
Tensor operand(const Tensor& x, bool packed, const char* name) {
  check_matrix(x, "scaled_int_mm", name);
  STD_TORCH_CHECK(x.scalar_type() == (packed ? ScalarType::Byte : ScalarType::Char),
                  "hot::scaled_int_mm: ", name,
                  " is not int8 (or both operands uint8: packed INT4)");
  bool usable = x.size(1) <= 1 || x.stride(1) == 1;
  usable = usable && on_16_bytes(x.data_ptr());
  usable = usable && (x.size(0) <= 1 || (x.stride(0) % 16 == 0 && x.stride(0) >= x.size(1)));
  return usable ? x : dense(x);
}

Tensor factor(const Tensor& x, int64_t length, const char* name) {
  STD_TORCH_CHECK(x.dim() == 1 && x.size(0) == length && x.scalar_type() == ScalarType::Float,
                  "hot::scaled_int_mm: ", name, " must be a float32 vector of ", length);
  return dense(x);
}

struct Operands {
  bool packed;  // two values a byte
  Tensor a, b, a_scale, b_scale;
  std::optional<Tensor> row_term, col_term;
  int64_t m, n, k;

  // Values from one row of x to the next.
  int64_t stride(const Tensor& x) const {
    return x.size(0) > 1 ? x.stride(0) * (packed ? 2 : 1) : k;
  }

  const float* row() const { return row_term ? data<float>(*row_term) : nullptr; }
  const float* col() const { return col_term ? data<float>(*col_term) : nullptr; }
};

Operands operands_of(const Tensor& a, const Tensor& b, const Tensor& a_scale, const Tensor& b_scale,
                     const std::optional<Tensor>& row_term, const std::optional<Tensor>& col_term) {
  bool packed = a.scalar_type() == ScalarType::Byte;
  Tensor rows = operand(a, packed, "a"), columns = operand(b, packed, "b");
  Operands o{packed, rows, columns,   a_scale,   b_scale,
             {},     {},   a.size(0), b.size(0), a.size(1) * (packed ? 2 : 1)};
  STD_TORCH_CHECK(b.size(1) == a.size(1), "hot::scaled_int_mm: a is ", o.m, " x ", a.size(1),
                  " and b ", o.n, " x ", b.size(1), ", expected the same second dimension");
  STD_TORCH_CHECK(o.k % kContractAlign == 0, "hot::scaled_int_mm: contracted dimension ", o.k,
                  " is not a multiple of 32");
  STD_TORCH_CHECK(o.m <= INT32_MAX && o.n <= INT32_MAX && o.k <= INT32_MAX,
                  "hot::scaled_int_mm: a dimension exceeds 2^31 - 1");
  STD_TORCH_CHECK(!packed || o.k <= 1 << 25, "hot::scaled_int_mm: sums of ", o.k,
                  " products of INT4 may exceed int32, expected at most 2^25");
  o.a_scale = factor(a_scale, o.m, "a_scale");
  o.b_scale = factor(b_scale, o.n, "b_scale");
  if (row_term && col_term) {
    o.row_term = factor(*row_term, o.m, "row_term");
    o.col_term = factor(*col_term, o.n, "col_term");
  }
  return o;
}

GemmProblem problem_of(const Operands& o, const DeviceFacts& facts, const Call& call) {
  GemmProblem p = {};
  p.a = static_cast<const int8_t*>(o.a.data_ptr());
  p.b = static_cast<const int8_t*>(o.b.data_ptr());
  p.a_scale = data<float>(o.a_scale);
  p.b_scale = data<float>(o.b_scale);
  p.row_term = o.row();
  p.col_term = o.col();
  p.m = static_cast<int>(o.m);
  p.n = static_cast<int>(o.n);
  p.k = static_cast<int>(o.k);
  p.batch = 1;
  p.lda = o.stride(o.a);
  p.ldb = o.stride(o.b);
  p.device = call.device;
  p.sm_count = facts.sm_count;
  p.stream = call.stream;
  return p;
}

// Sums of every slice of K, each in its slab; the slices equal but for a shorter last one.
void run_slices(GemmProblem p, GemmKernel kernel, int64_t slice, int32_t* sums) {
  int64_t k = p.k, whole = k / slice;
  p.out = sums;
  p.batch = static_cast<int>(whole);
  p.k = static_cast<int>(slice);
  if (whole > 0) kernel(p);
  if (k % slice == 0) return;
  p.a += whole * slice;
  p.b += whole * slice;
  p.out = sums + whole * p.slab;
  p.batch = 1;
  p.k = static_cast<int>(k % slice);
  kernel(p);
}

// The Ampere kernels write whole vectors of sums: b gets rows of zeros up to a multiple of them.
Tensor pad_rows(const Tensor& b, int64_t rows, const Call& call) {
  int64_t n = b.size(0), bytes = b.size(1);
  Tensor padded = empty(b, {rows, bytes}, b.scalar_type());
  char* target = static_cast<char*>(padded.data_ptr());
  check_cuda(cudaMemcpy2DAsync(target, bytes, b.data_ptr(), n > 1 ? b.stride(0) : bytes, bytes, n,
                               cudaMemcpyDeviceToDevice, call.stream),
             "copy");
  call.zero(target + n * bytes, (rows - n) * bytes);
  return padded;
}

// Sums of every slice of K, and what an epilogue is told of them. `sums` holds the memory.
CombineTask run_sums(const Operands& o, GemmProblem p, const GemmPlan& plan, bool hopper,
                     std::optional<Tensor>& sums, const Call& call) {
  int64_t stride = round_up(o.n, kSm80Vector),
          slabs = o.k == 0 ? 0 : (o.k + plan.slice - 1) / plan.slice;
  p.ldo = stride;
  p.slab = o.m * stride;
  sums = empty(o.a, {slabs * p.slab}, ScalarType::Int);
  std::optional<Tensor> padded;
  if (!hopper && stride != o.n) {
    padded = pad_rows(o.b, stride, call);
    p.b = static_cast<const int8_t*>(padded->data_ptr());
    p.ldb = o.k;
    p.n = static_cast<int>(stride);
  }
  if (slabs > 0) run_slices(p, plan.kernel, plan.slice, data<int32_t>(*sums));
  CombineTask task = {};
  task.sums = data<int32_t>(*sums);
  task.slabs = static_cast<int>(slabs);
  task.m = o.m;
  task.n = o.n;
  task.stride = stride;
  task.slab = p.slab;
  task.a_scale = p.a_scale;
  task.b_scale = p.b_scale;
  task.row_term = p.row_term;
  task.col_term = p.col_term;
  task.stream = call.stream;
  return task;
}

Tensor scaled_int_mm(const Tensor& a, const Tensor& b, const Tensor& a_scale, const Tensor& b_scale,
                     const std::optional<Tensor>& row_term, const std::optional<Tensor>& col_term,
                     ScalarType out_dtype) {
  Call call(a);
  Operands o = operands_of(a, b, a_scale, b_scale, row_term, col_term);
  OutType type = out_type(out_dtype);
  Tensor out = empty(a, {o.m, o.n}, out_dtype);
  if (o.m == 0 || o.n == 0) return out;
  DeviceFacts facts = facts_of(call.device);
  bool hopper = facts.hopper && !o.packed;  // whose tensor cores have no INT4
  GemmPlan plan = plan_gemm({o.m, o.n, o.k, type, hopper, o.packed, facts.sm_count});
  GemmProblem p = problem_of(o, facts, call);
  if (!plan.fused) {
    std::optional<Tensor> sums;
    CombineTask task = run_sums(o, p, plan, hopper, sums, call);
    task.out = out.data_ptr();
    task.type = type;
    combine(task);
    return out;
  }
  p.out = out.data_ptr();
  p.ldo = o.n;
  plan.kernel(p);
  return out;
}

Tensor hadamard_int_mm(const Tensor& transformed, const Tensor& equal, const Tensor& other,
                       const Tensor& scale, int64_t outputs, bool outputs_last,
                       ScalarType out_dtype) {
  constexpr const char* op = "hadamard_int_mm";
  check_matrix(transformed, op, "transformed");
  check_matrix(other, op, "other");
  Call call(transformed);
  int64_t padded = transformed.size(0), inputs = other.size(0);
  STD_TORCH_CHECK(outputs >= 0 && padded == round_up(outputs, kOrder), "hot::", op,
                  ": transformed has ", padded, " rows, expected ", outputs,
                  " outputs rounded up to ", kOrder);
  OutType type = out_type(out_dtype);
  Tensor out =
      empty(other, {outputs_last ? inputs : outputs, outputs_last ? outputs : inputs}, out_dtype);
  if (outputs == 0 || inputs == 0) return out;
  const Tensor &a = outputs_last ? other : transformed, &b = outputs_last ? transformed : other;
  Operands o =
      operands_of(a, b, outputs_last ? scale : equal, outputs_last ? equal : scale, {}, {});
  DeviceFacts facts = facts_of(call.device);
  GemmShape shape = {o.m, o.n, o.k, type, facts.hopper, o.packed, facts.sm_count};
  GemmPlan plan = plan_hadamard(shape, outputs_last, outputs != padded);
  GemmProblem p = problem_of(o, facts, call);
  if (plan.fused) {
    p.out = out.data_ptr();
    p.ldo = o.n;
    plan.kernel(p);
    return out;
  }
  std::optional<Tensor> sums;
  CombineTask task = run_sums(o, p, plan, facts.hopper, sums, call);
  task.out = out.data_ptr();
  task.type = type;
  combine_transformed(task, outputs, outputs_last);
  return out;
}

// total [m, n] (fp32) plus the product, in its place: of heads' chunks, where a product's result is
// as large as all weights of a layer. `first`: total holds nothing yet.
void add_scaled_int_mm(const Tensor& total, const Tensor& a, const Tensor& b, const Tensor& a_scale,
                       const Tensor& b_scale, bool first) {
  constexpr const char* op = "add_scaled_int_mm";
  check_matrix(total, op, "total");
  Call call(a);
  Operands o = operands_of(a, b, a_scale, b_scale, {}, {});
  STD_TORCH_CHECK(total.scalar_type() == ScalarType::Float && total.is_contiguous() &&
                      total.size(0) == o.m && total.size(1) == o.n && o.n % 4 == 0,
                  "hot::", op, ": total is ", total.size(0), " x ", total.size(1),
                  ", expected contiguous float32 of ", o.m, " x ", o.n, " and whole vectors of 4");
  DeviceFacts facts = facts_of(call.device);
  GemmProblem p = problem_of(o, facts, call);
  p.out = total.data_ptr();
  p.ldo = o.n;
  GemmKernel kernel = adding_kernel(facts.hopper && !o.packed, o.k, first);
  if (o.m > 0 && o.n > 0) kernel(p);
}

STABLE_TORCH_LIBRARY_IMPL(hot, CUDA, m) {
  m.impl("add_scaled_int_mm", TORCH_BOX(&add_scaled_int_mm));
  m.impl("scaled_int_mm", TORCH_BOX(&scaled_int_mm));
  m.impl("hadamard_int_mm", TORCH_BOX(&hadamard_int_mm));
}

}  // namespace
}  // namespace hot
