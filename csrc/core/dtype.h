// The element types of arrays in calls: names and sizes. kernels/ has their arithmetic.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace pycomm {

enum class Dtype : uint8_t {
  float16,
  bfloat16,
  float32,
  float64,
  int8,
  int16,
  int32,
  int64,
  uint8,
  boolean,
};

struct DtypeInfo {
  std::string_view name;
  size_t bytes;
};

inline constexpr std::array<DtypeInfo, 10> kDtypes{{
    {"float16", 2},
    {"bfloat16", 2},
    {"float32", 4},
    {"float64", 8},
    {"int8", 1},
    {"int16", 2},
    {"int32", 4},
    {"int64", 8},
    {"uint8", 1},
    {"bool", 1},
}};

constexpr size_t bytes_of(Dtype dtype) { return kDtypes[static_cast<size_t>(dtype)].bytes; }
constexpr std::string_view name_of(Dtype dtype) { return kDtypes[static_cast<size_t>(dtype)].name; }
constexpr bool is_half(Dtype dtype) { return dtype == Dtype::float16 || dtype == Dtype::bfloat16; }

}  // namespace pycomm
