// A collective as data: the ordered sends, receives and reductions of one rank.
//
// A plan is a pure function of (rank, size, count), independent of buffers, dtypes, sockets and
// streams. engine/ runs plans; tests/native/prove.h checks them without threads or buffers.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <span>
#include <vector>

namespace pycomm::collectives {

// The memory of a range. `input` and `output` belong to the caller and may be the same array (then
// equal offsets are equal places); `scratch` belongs to the engine.
enum class Space : uint8_t { input, output, scratch };

// A run of whole elements.
struct Range {
  Space space = Space::output;
  size_t begin = 0, count = 0;
};

// How a received range is combined. (+) is the reduction.
//   copy    in = arrived
//   reduce  in = with (+) arrived
//   finish  in = last(with (+) arrived): the last addition of an element; `avg` divides here, once
//   fold    in = last(slot 0 (+) slot 1 (+) ...), where `arrived` is a sequence of runs of in.count
//           elements. Local only; 16-bit floats are added in float32 and rounded once
enum class Combine : uint8_t { copy, reduce, finish, fold };

inline constexpr int kNoRank = -1;

// One step of one rank: send `out` to `to`, and combine the data from `from` into `in`. Either peer
// may be kNoRank. A move from a rank to itself is local: `out` is the received data, and a copy of
// an empty range fills `in` with zeros.
//
// Sends run in the order of the moves, and so do receives, but the two sequences advance
// independently: the send of move i+1 may start as soon as the elements that it reads are complete.
// `in` never overlaps the `out` of the same move. Two ranks agree on the order of the messages
// between them.
struct Move {
  int to = kNoRank;
  Range out{};
  int from = kNoRank;
  Range in{};
  Combine combine = Combine::copy;
  Range with{};  // of in.count elements; read by reduce and finish only
};

// The arguments of a plan. `count` is the number of elements of: the array (all_reduce, reduce,
// broadcast), one rank's input (all_gather, gather), one rank's output (reduce_scatter, scatter),
// one rank's message to another (all_to_all).
struct CollectiveShape {
  int rank = 0, size = 1;
  size_t count = 0;
  int root = 0;  // for reduce, broadcast, gather, scatter
  // If not empty, `count` is 0. all_gather: elements that each rank contributes, the same list on
  // all ranks. all_to_all: elements sent to each rank, then elements received from each.
  std::span<const size_t> counts{};
  // By rank: its host, numbered from 0 in order of their first ranks. Empty: one host.
  std::span<const int> hosts{};
};

struct Plan {
  std::vector<Move> moves;
  size_t scratch = 0;  // elements of scratch that the plan needs
};

// Pieces of long arrays are cut between runs of this many elements, so that every piece of an
// aligned array starts at a multiple of 128 bytes, whatever the dtype.
inline constexpr size_t kPieceGrain = 128;

// Piece `i` (taken modulo `size`) of `count` elements cut into `size` near-equal runs. The first is
// the longest, by at most a sixteenth of the mean: short arrays are cut at a smaller power of two,
// and at any element below 32 elements a piece.
inline Range piece(Space space, size_t count, int size, int i) {
  const auto n = static_cast<size_t>(size), c = static_cast<size_t>((i % size + size) % size);
  const size_t grain = std::bit_floor(std::clamp<size_t>(count / n / 16, 1, kPieceGrain));
  const size_t grains = (count + grain - 1) / grain;
  const auto begin_of = [&](size_t at) {
    return std::min(count, grain * (at * (grains / n) + std::min(at, grains % n)));
  };
  return {space, begin_of(c), begin_of(c + 1) - begin_of(c)};
}

// Run `i` of consecutive runs: of counts[i] elements, or of `count` each if `counts` is empty.
inline Range part(Space space, size_t count, std::span<const size_t> counts, int i) {
  const auto at = static_cast<size_t>(i);
  if (counts.empty()) return {space, at * count, count};
  const auto before = counts.first(at);
  return {space, std::accumulate(before.begin(), before.end(), size_t{0}), counts[at]};
}

}  // namespace pycomm::collectives
