// The operations and the algorithms that can be selected for them, with their names.
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
  reduce,
  gather,
  scatter,
  all_to_all,
};

inline constexpr std::array<std::string_view, 11> kOperations{
    "all_reduce", "broadcast", "all_gather", "reduce_scatter", "send",      "recv",
    "barrier",    "reduce",    "gather",     "scatter",        "all_to_all"};

constexpr std::string_view name_of(Operation operation) {
  return kOperations[static_cast<size_t>(operation)];
}

enum class Algorithm : uint8_t {
  automatic,
  ring,
  tree,
  direct,
  direct_two_phase,
  halving,
  hierarchical,
  shared_memory,
  nccl,         // NCCL's collectives
  host_staged,  // device arrays, by a collective in host memory
};

inline constexpr std::array<std::string_view, 10> kAlgorithms{
    "auto",    "ring",         "tree",          "direct", "direct_two_phase",
    "halving", "hierarchical", "shared_memory", "nccl",   "host_staged"};

constexpr std::string_view name_of(Algorithm algorithm) {
  return kAlgorithms[static_cast<size_t>(algorithm)];
}

// Whether an algorithm is for device arrays alone.
constexpr bool is_for_devices(Algorithm algorithm) {
  return algorithm == Algorithm::nccl || algorithm == Algorithm::host_staged;
}

}  // namespace pycomm
