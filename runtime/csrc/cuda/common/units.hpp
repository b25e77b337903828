// Units of 16 rows: what HLA transforms together, and what shares a bound of its rows' scales.
#pragma once

#include "cuda/common/tensors.hpp"

namespace hot {

constexpr int64_t kUnit = 16;

// Contracted rows of a unit.
inline int64_t unit_rows(int64_t rank) { return rank == 0 ? kUnit : rank; }

// How `rows` rows fall into units, see reference._transform_rows; rank 0 takes them as they come.
struct Units {
  int64_t samples, tokens, contracted, count;

  Units(int64_t rows, int64_t rank, int64_t tokens_wanted, const char* op) {
    STD_TORCH_CHECK(rank == 0 || rank == 8, "hot::", op, ": rank is ", rank, ", expected 0 or 8");
    tokens = rank == 0 ? 1 : tokens_wanted;
    STD_TORCH_CHECK(tokens >= 1 && rows % tokens == 0, "hot::", op, ": ", rows,
                    " rows are not a multiple of tokens = ", tokens);
    samples = rows / tokens;
    int64_t blocks = (samples + kUnit - 1) / kUnit * tokens;
    contracted = round_up(rank == 0 ? rows : rank * blocks, kContractAlign);
    STD_TORCH_CHECK(contracted <= UINT32_MAX, "hot::", op, ": ", contracted,
                    " contracted rows, expected below 2^32");
    count = contracted / unit_rows(rank);
  }
};

}  // namespace hot
