// The reductions and their names. kernels/ has their arithmetic.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace pycomm {

enum class ReduceOp : uint8_t { sum, avg, product, min, max, band, bor, bxor };

inline constexpr std::array<std::string_view, 8> kReduceOps{"sum", "avg",  "product", "min",
                                                            "max", "band", "bor",     "bxor"};

constexpr std::string_view name_of(ReduceOp op) { return kReduceOps[static_cast<size_t>(op)]; }

}  // namespace pycomm
