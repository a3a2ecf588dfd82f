// A collective call as a case: its arrays, what they must become by a plain model, and what it may
// send. In place, with counts by rank, and without the arrays that a rank does not need.
#pragma once

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "collectives/choose.h"
#include "harness.h"
#include "ranks.h"
#include "transport/frame.h"

namespace ranks {

using namespace pycomm;

struct Case {
  Operation operation;
  Algorithm algorithm;
  Dtype dtype;
  ReduceOp op;
  size_t count;
  int root;
  bool in_place;
  int call;  // varies the numbers
  // Empty, or: all_gather: what each rank gives; all_to_all: [from * size + to].
  std::vector<size_t> counts{};

  std::string text() const {
    std::string list;
    for (const size_t n : counts) list += (list.empty() ? " counts " : ",") + std::to_string(n);
    return std::string(name_of(operation)) + " " + std::string(name_of(algorithm)) + " " +
           std::string(name_of(dtype)) + " " + std::string(name_of(op)) + " count " +
           std::to_string(count) + " root " + std::to_string(root) + list +
           (in_place ? " in place" : "");
  }
  bool rooted() const {
    return operation == Operation::broadcast || operation == Operation::reduce ||
           operation == Operation::gather || operation == Operation::scatter;
  }
  // What one rank gives to another, or to all.
  size_t given(int from, int to, int size) const {
    if (counts.empty()) return count;
    const int at = operation == Operation::all_to_all ? from * size + to : from;
    return counts[static_cast<size_t>(at)];
  }
  // As passed to the call of `rank`.
  std::vector<size_t> told_counts(int rank, int size) const {
    if (operation != Operation::all_to_all || counts.empty()) return counts;
    std::vector<size_t> told;
    for (int to = 0; to < size; ++to) told.push_back(given(rank, to, size));
    for (int from = 0; from < size; ++from) told.push_back(given(from, rank, size));
    return told;
  }
};

inline int reduced(const Case& c, int size, size_t i) {
  int result = element(0, i, c.call);
  for (int rank = 1; rank < size; ++rank) {
    const int next = element(rank, i, c.call);
    if (c.op == ReduceOp::sum) result += next;
    if (c.op == ReduceOp::max) result = std::max(result, next);
    if (c.op == ReduceOp::min) result = std::min(result, next);
  }
  return result;
}

inline size_t input_count(const Case& c, int rank, int size) {
  const auto ranks = static_cast<size_t>(size);
  size_t all = 0;
  switch (c.operation) {
    case Operation::reduce_scatter:
      return c.count * ranks;
    case Operation::scatter:
      return rank == c.root ? c.count * ranks : 0;
    case Operation::all_to_all:
      for (int to = 0; to < size; ++to) all += c.given(rank, to, size);
      return all;
    case Operation::all_reduce:
    case Operation::broadcast:
    case Operation::all_gather:
    case Operation::reduce:
    case Operation::gather:
    case Operation::send:
    case Operation::recv:
    case Operation::barrier:
      break;
  }
  return c.given(rank, 0, size);
}

// A part of an output: elements of one rank's input, or of their reduction.
struct Part {
  static constexpr int kReduced = -1;
  int from;
  size_t begin, count;
};

// What the output of `rank` must hold.
inline std::vector<Part> parts(const Case& c, int rank, int size) {
  std::vector<Part> all;
  const auto copy = [&](int from, size_t begin, size_t count) {
    all.push_back({from, begin, count});
  };
  const auto reduce = [&](size_t begin) { copy(Part::kReduced, begin, c.count); };
  const size_t mine = static_cast<size_t>(rank) * c.count;
  switch (c.operation) {
    case Operation::all_reduce:
      reduce(0);
      break;
    case Operation::reduce:
      if (rank == c.root) reduce(0);
      break;
    case Operation::reduce_scatter:
      reduce(mine);
      break;
    case Operation::broadcast:
      copy(c.root, 0, c.count);
      break;
    case Operation::scatter:
      copy(c.root, mine, c.count);
      break;
    case Operation::gather:
      if (rank != c.root) break;
      [[fallthrough]];
    case Operation::all_gather:
      for (int from = 0; from < size; ++from) copy(from, 0, c.given(from, rank, size));
      break;
    case Operation::all_to_all:
      for (int from = 0; from < size; ++from) {
        size_t before = 0;
        for (int to = 0; to < rank; ++to) before += c.given(from, to, size);
        copy(from, before, c.given(from, rank, size));
      }
      break;
    case Operation::send:
    case Operation::recv:
    case Operation::barrier:
      break;
  }
  return all;
}

inline size_t output_count(const Case& c, int rank, int size) {
  size_t count = 0;
  for (const Part& part : parts(c, rank, size)) count += part.count;
  return count;
}

inline Array wanted(const Case& c, int rank, int size) {
  Array array(c.dtype, output_count(c, rank, size));
  size_t at = 0;
  for (const Part& part : parts(c, rank, size)) {
    array.fill(at, part.count, [&](size_t i) {
      return part.from == Part::kReduced ? reduced(c, size, part.begin + i)
                                         : element(part.from, part.begin + i, c.call);
    });
    at += part.count;
  }
  return array;
}

// The arrays of one rank. In place there is one: the larger, with the other inside it. An array
// without elements has no address.
struct Arrays {
  Arrays(const Case& c, int rank, int size)
      : input(c.dtype, input_count(c, rank, size)), output(c.dtype, output_count(c, rank, size)) {
    input.fill([&](size_t i) { return element(rank, i, c.call); });
    call = {.operation = c.operation,
            .dtype = c.dtype,
            .op = c.op,
            .input = input.count() > 0 ? input.data() : nullptr,
            .output = output.count() > 0 ? output.data() : nullptr,
            .count = c.count,
            .peer = c.root,
            .algorithm = c.algorithm,
            .counts = c.told_counts(rank, size)};
    if (c.operation == Operation::broadcast) {
      call.input = nullptr;
      if (rank == c.root) std::memcpy(output.data(), input.data(), input.bytes());
    } else if (c.in_place && c.operation != Operation::all_to_all && output.count() > 0) {
      share(c, rank, size);
    }
  }
  void share(const Case& c, int rank, int size) {
    size_t before = 0;
    for (int i = 0; i < rank; ++i) before += c.given(i, 0, size);
    if (input.count() > output.count()) {
      call.output = input.at(before);
    } else if (input.count() > 0) {
      const size_t at = input.count() < output.count() ? before : 0;
      std::memcpy(output.at(at), input.data(), input.bytes());
      call.input = output.at(at);
    }
  }
  Array input, output;
  group::Call call;
};

// Checks the result of a call; the input must be as it was unless it is the output.
inline void expect_result(const Case& c, Arrays& arrays, int rank, int size) {
  Array want = wanted(c, rank, size);
  Arrays fresh(c, rank, size);
  if (arrays.call.output != nullptr && arrays.call.output != arrays.output.data()) {
    const size_t at = static_cast<size_t>(rank) * c.count;  // in the input
    std::memcpy(fresh.input.at(at), want.data(), want.bytes());
    want = Array(c.dtype, want.count());
  }
  expect(arrays.output == want, c.text() + ": the output is wrong");
  expect(arrays.input == fresh.input, c.text() + ": the input is wrong");
}

// What a plan sends: payload, and frames.
inline std::pair<uint64_t, uint64_t> traffic(const Case& c, const group::Group& group) {
  uint64_t bytes = 0, frames = 0;
  const int rank = group.rank(), size = group.size();
  const auto counts = c.told_counts(rank, size);
  const collectives::CollectiveShape place{.rank = rank,
                                           .size = size,
                                           .count = c.count,
                                           .root = c.root,
                                           .counts = counts,
                                           .hosts = group.info().hosts};
  for (const collectives::Move& move :
       collectives::make_plan(c.algorithm, c.operation, place).moves) {
    if (move.to == collectives::kNoRank || move.to == rank) continue;
    bytes += move.out.count * bytes_of(c.dtype);
    frames += transport::frames_for(move.out.count * bytes_of(c.dtype));
  }
  return {bytes, frames};
}

// What an all_to_all with counts sends before its plan: payload, and frames. As much as an
// all_gather of the counts of all ranks, which this makes. Collective.
inline std::pair<uint64_t, uint64_t> traffic_of_counts(const Case& c, group::Group& group) {
  if (c.operation != Operation::all_to_all || c.counts.empty()) return {0, 0};
  std::vector<size_t> counts = c.told_counts(group.rank(), group.size());
  std::vector<size_t> table(counts.size() * static_cast<size_t>(group.size()));
  const group::Stats before = group.stats();
  group.run({.operation = Operation::all_gather,
             .dtype = Dtype::int64,
             .input = counts.data(),
             .output = table.data(),
             .count = counts.size()});
  const group::Stats after = group.stats();
  return {after.bytes_sent - before.bytes_sent, after.frames_sent - before.frames_sent};
}

// Only the result is checked.
inline void run_plain(group::Group& group, const Case& c) {
  Arrays arrays(c, group.rank(), group.size());
  group.run(arrays.call);
  expect_result(c, arrays, group.rank(), group.size());
}

inline void run_case(group::Group& group, const Case& c) {
  Arrays arrays(c, group.rank(), group.size());
  const auto [count_bytes, count_frames] = traffic_of_counts(c, group);
  const group::Stats before = group.stats();
  group.run(arrays.call);
  const group::Stats after = group.stats();
  expect_result(c, arrays, group.rank(), group.size());
  auto [bytes, frames] = traffic(c, group);
  bytes += count_bytes;
  frames += count_frames;
  const uint64_t sent = after.bytes_sent - before.bytes_sent;
  expect_equal(sent, bytes, c.text() + ": payload bytes");
  expect_equal(after.frames_sent - before.frames_sent, frames, c.text() + ": frames");
  expect_equal(after.bytes_written - before.bytes_written,
               sent + sizeof(transport::Header) * frames, c.text() + ": bytes written");
}

}  // namespace ranks
