// The verbs, by name, and the algorithms that can be forced for them.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace pycomm {

enum class Operation : uint8_t {
  all_reduce,
  broadcast,
  all_gather,
  reduce_scatter,
  send,
  recv,
  barrier,
};

inline constexpr std::array<std::string_view, 7> kOperations{
    "all_reduce", "broadcast", "all_gather", "reduce_scatter", "send", "recv", "barrier"};

constexpr std::string_view name_of(Operation operation) {
  return kOperations[static_cast<size_t>(operation)];
}

enum class Algorithm : uint8_t { automatic, ring, tree, direct, owner };

inline constexpr std::array<std::string_view, 5> kAlgorithms{"auto", "ring", "tree", "direct",
                                                             "owner"};

constexpr std::string_view name_of(Algorithm algorithm) {
  return kAlgorithms[static_cast<size_t>(algorithm)];
}

}  // namespace pycomm
