// The workspace of a step: the layout of its parts, and the rows of its tables. Host code only.
#pragma once

#include <vector>

#include "cuda/begin.cuh"
#include "cuda/host.hpp"
#include "kernels/device_kernels.h"

namespace pycomm::cuda {

// The tables of a step, without a workspace.
struct Rows {
  std::vector<Piece> pieces;
  std::vector<Selection> selections;
  unsigned tiles = 0, pool = 0;
  unsigned units = 0;  // of pack, with the shortest runs
};

// Capacity of the pool. Dense selections (above 1/16) read the whole tensors instead.
inline unsigned pool_capacity(size_t count, size_t k) {
  const size_t sparse = k <= count / 16 ? 4 * k : 0;
  return static_cast<unsigned>(std::min(count, sparse + kSample));
}

inline void add_piece(Rows& rows, const Piece& like, unsigned place) {
  Piece piece = like;
  piece.first_tile = rows.tiles;
  piece.place = place;
  piece.selection = static_cast<unsigned>(rows.selections.size());
  rows.tiles += (piece.count + kTile - 1) / kTile;
  rows.pieces.push_back(piece);
}

// Completes a selection whose pieces were added since `first_tile`.
inline void add_selection(Rows& rows, Selection selection, unsigned first_tile, unsigned count,
                          unsigned capacity) {
  selection.count = count;
  selection.first_tile = first_tile;
  selection.tiles = rows.tiles - first_tile;
  selection.pool = rows.pool;
  selection.capacity = capacity;
  rows.units += (selection.tiles + kWarps - 1) / kWarps;
  rows.pool += (capacity + 3) / 4 * 4;  // so that 16-byte accesses are aligned
  rows.selections.push_back(selection);
}

// Allocates from the workspace, aligned to 256 bytes. With a null workspace it only computes the
// size.
class BumpAllocator {
 public:
  explicit BumpAllocator(void* base) : base_(static_cast<char*>(base)) {}
  template <class T>
  void take(T*& part, size_t count) {
    part = base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + bytes_);
    bytes_ += (count * sizeof(T) + 255) / 256 * 256;
  }
  size_t bytes() const { return bytes_; }

 private:
  char* base_;
  size_t bytes_ = 0;
};

// Places the tables of `rows` in a workspace; `bytes` becomes their size. State kept between steps
// comes first; its layout depends only on the number of selections.
template <class V>
Tables lay_out(const Rows& rows, void* workspace, size_t& bytes) {
  Tables t{};
  t.piece_count = static_cast<unsigned>(rows.pieces.size());
  t.selection_count = static_cast<unsigned>(rows.selections.size());
  t.tiles = rows.tiles;
  BumpAllocator allocator(workspace);
  allocator.take(t.memory, t.selection_count);
  allocator.take(t.header, 1);
  allocator.take(t.states, t.selection_count);
  allocator.take(t.pieces, t.piece_count);
  allocator.take(t.first_tiles, t.piece_count);
  allocator.take(t.selections, t.selection_count);
  allocator.take(t.bins, size_t{t.selection_count} * kBins<V>);
  allocator.take(t.spans, t.tiles);
  allocator.take(t.unit_counts, rows.units);
  allocator.take(t.pool_places, rows.pool);
  V* values = nullptr;
  allocator.take(values, rows.pool);
  t.pool_values = values;
  bytes = allocator.bytes();
  return t;
}

// Divides the work of select and pack. Units of pack are as long as needed for all blocks to be
// resident at once, because each of them waits for those before it.
inline void divide_work(Tables& t, Rows& rows) {
  const unsigned processors = multiprocessors();
  t.select_blocks = std::clamp(std::max(t.tiles, t.selection_count), 1u, 2 * processors);
  const unsigned resident = kPackBlocks * processors * kWarps;  // warps of pack
  t.run = std::max(1u, (t.tiles + resident - 1) / resident) * kWarps;
  t.units = 0;
  for (Selection& selection : rows.selections) {
    selection.first_unit = t.units;
    t.units += (selection.tiles + t.run - 1) / t.run;
  }
}

template <class AnyPage>
AnyPage page_of(const Rows& rows, unsigned number) {
  constexpr unsigned kSize = std::extent_v<decltype(AnyPage::pieces)>;
  AnyPage page{};
  const auto part = [&](const auto& from, auto* to, unsigned& first) {
    const size_t begin = std::min<size_t>(from.size(), size_t{number} * kSize);
    const size_t end = std::min<size_t>(from.size(), begin + kSize);
    std::copy(from.begin() + static_cast<std::ptrdiff_t>(begin),
              from.begin() + static_cast<std::ptrdiff_t>(end), to);
    first = static_cast<unsigned>(begin);
    return static_cast<unsigned>(end - begin);
  };
  page.piece_count = part(rows.pieces, page.pieces, page.first_piece);
  page.selection_count = part(rows.selections, page.selections, page.first_selection);
  return page;
}

}  // namespace pycomm::cuda
