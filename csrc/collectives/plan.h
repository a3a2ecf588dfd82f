// A collective as data: what one rank sends, receives and combines, in order.
//
// A plan is a pure function of (rank, size, count). No buffer, dtype, socket or stream appears in
// it; engine/ runs plans and tests/native/prove.h proves them without a thread or a byte of memory.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <span>
#include <vector>

namespace pycomm {

// The three memories a range can lie in. `input` and `output` are the caller's and may be the same
// array (then equal offsets are equal places); `scratch` belongs to the engine.
enum class Space : uint8_t { input, output, scratch };

// A run of whole elements.
struct Range {
  Space space = Space::output;
  size_t begin = 0, count = 0;
};

// What becomes of a run that arrives.
//   copy    in = arrived
//   reduce  in = with (+) arrived
//   finish  in = last(with (+) arrived): the last addition of an element; `avg` divides here, once
//   fold    in = last(slot 0 (+) slot 1 (+) ...), where arrived is that many runs of in.count
//           elements after one another. Local only; 16-bit floats are added in float32 and rounded
//           once
enum class Combine : uint8_t { copy, reduce, finish, fold };

inline constexpr int kNoRank = -1;

// One step of one rank: send `out` to `to` while what `from` sends is combined into `in`. Either
// peer may be kNoRank. A move to and from oneself is local: `out` is what arrives, and a copy of
// nothing fills `in` with zeros.
//
// Sends happen in the order of the moves, and so do receives, but the two orders advance on their
// own: the send of move i+1 may start as soon as the elements that it reads are there. `in` never
// overlaps the `out` of the same move. Two ranks agree on the order of what travels between them.
struct Move {
  int to = kNoRank;
  Range out{};
  int from = kNoRank;
  Range in{};
  Combine combine = Combine::copy;
  Range with{};  // of in.count elements; read by reduce and finish only
};

// What a plan is a function of. `count` is elements of: the array (all_reduce, reduce, broadcast),
// one rank's input (all_gather, gather), one rank's output (reduce_scatter, scatter), what one rank
// sends another (all_to_all).
struct CollectiveShape {
  int rank = 0, size = 1;
  size_t count = 0;
  int root = 0;  // of reduce, broadcast, gather, scatter
  // Empty, or: all_gather: elements that each rank gives, the same list on all ranks; all_to_all:
  // elements that go to each rank, and behind them those that come from each. Then `count` is 0.
  std::span<const size_t> counts{};
  // By rank: which host, numbered from 0 in order of their first ranks. Empty: one host.
  std::span<const int> hosts{};
};

struct Plan {
  std::vector<Move> moves;
  size_t scratch = 0;  // elements of scratch that the ranges reach
};

// Piece `i` (taken modulo `size`) of `count` elements cut into `size` near-equal runs; the first
// `count % size` pieces are one element longer.
inline Range piece(Space space, size_t count, int size, int i) {
  const auto n = static_cast<size_t>(size), c = static_cast<size_t>((i % size + size) % size);
  return {space, c * (count / n) + std::min(c, count % n), count / n + (c < count % n ? 1 : 0)};
}

// Run `i` of those that lie after one another: of counts[i] elements, or of `count` each where
// `counts` is empty.
inline Range part(Space space, size_t count, std::span<const size_t> counts, int i) {
  const auto at = static_cast<size_t>(i);
  if (counts.empty()) return {space, at * count, count};
  const auto before = counts.first(at);
  return {space, std::accumulate(before.begin(), before.end(), size_t{0}), counts[at]};
}

}  // namespace pycomm
