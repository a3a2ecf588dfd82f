// Each operation for the prover: the lengths of a rank's arrays, the elements of its input, and the
// required contents of its output.
#pragma once

#include <cstddef>
#include <numeric>
#include <span>
#include <vector>

#include "prove.h"

namespace pycomm::symbols {

// Elements `element`, `element` + 1, ... of rank `giver`, or of the sum over all ranks.
struct Wanted {
  size_t count = 0;
  size_t element = 0;
  int giver = 0;
  bool sum = false;
};

struct Shape {
  size_t input = 0, output = 0;
  size_t element = 0;        // the number of the input's first element
  bool gives = true;         // whether the input, or in broadcast the output, holds anything yet
  bool one_way = false;      // output may be written before data of all ranks
  size_t own_in_output = 0;  // offset of the input in the output, if they are one array
  size_t own_in_input = 0;   // offset of the output in the input
  std::vector<Wanted> wanted{};  // after one another, the whole output
};

inline size_t total(std::span<const size_t> counts) {
  return std::accumulate(counts.begin(), counts.end(), size_t{0});
}

// Of the part that rank `r` gives or gets: its elements, and the elements before it.
struct Parts {
  const Case& what;
  size_t size;
  size_t count(size_t r) const { return what.counts.empty() ? what.count : what.counts[r]; }
  size_t before(size_t r) const {
    return what.counts.empty() ? r * what.count : total(std::span(what.counts).first(r));
  }
  // all_to_all: counts[from * size + to].
  size_t pair(size_t from, size_t to) const {
    return what.counts.empty() ? what.count : what.counts[from * size + to];
  }
};

inline Shape all_to_all_shape(const Parts& parts, size_t rank) {
  Shape shape;
  for (size_t peer = 0; peer < parts.size; ++peer) {
    size_t element = 0;
    for (size_t to = 0; to < rank; ++to) element += parts.pair(peer, to);
    shape.wanted.push_back({parts.pair(peer, rank), element, static_cast<int>(peer)});
    shape.input += parts.pair(rank, peer);
    shape.output += parts.pair(peer, rank);
  }
  return shape;
}

inline Shape gather_shape(const Parts& parts, size_t rank, bool gets) {
  Shape shape{.input = parts.count(rank), .element = parts.before(rank)};
  if (!gets) return shape;
  shape.output = parts.before(parts.size);
  shape.own_in_output = shape.element;
  for (size_t peer = 0; peer < parts.size; ++peer)
    shape.wanted.push_back({parts.count(peer), parts.before(peer), static_cast<int>(peer)});
  return shape;
}

inline Shape shape_of(const Case& what, int rank, int size) {
  const auto r = static_cast<size_t>(rank);
  const Parts parts{what, static_cast<size_t>(size)};
  const size_t count = what.count, whole = parts.before(parts.size);
  const bool is_root = rank == what.root;
  switch (what.operation) {
    case Operation::all_reduce:
      return {.input = count, .output = count, .wanted = {{count, 0, 0, true}}};
    case Operation::reduce:
      if (!is_root) return {.input = count};
      return {.input = count, .output = count, .wanted = {{count, 0, 0, true}}};
    case Operation::reduce_scatter:
      return {.input = whole,
              .output = parts.count(r),
              .own_in_input = parts.before(r),
              .wanted = {{parts.count(r), parts.before(r), 0, true}}};
    case Operation::broadcast:
      return {
          .output = count, .gives = is_root, .one_way = true, .wanted = {{count, 0, what.root}}};
    case Operation::scatter:
      return {.input = is_root ? whole : 0,
              .output = count,
              .one_way = true,
              .own_in_input = is_root ? r * count : 0,
              .wanted = {{count, r * count, what.root}}};
    case Operation::all_gather:
      return gather_shape(parts, r, true);
    case Operation::gather:
      return gather_shape(parts, r, is_root);
    case Operation::all_to_all:
      return all_to_all_shape(parts, r);
    case Operation::barrier:
    case Operation::send:
    case Operation::recv:
      break;
  }
  return {};
}

}  // namespace pycomm::symbols
