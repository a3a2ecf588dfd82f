// A call on arrays that lie anywhere, where the ranks of a host may read each other's processes:
// each takes what it needs out of the others' arrays as they are, and nothing is staged.
//
//   all_reduce, two ranks    rank 0                              rank 1
//     sum                    reads 1's piece 0, adds its own     reads 0's piece 1, adds its own
//     collect                reads 1's piece 1                   reads 0's piece 0
//     end                    when all ranks have read
//
//   operation        sum               collect
//   all_reduce       its piece         the others' pieces, out of their outputs
//   reduce_scatter   its row
//   broadcast                          the root's array
//   all_gather                         the others' inputs
//
// An all_reduce of S bytes reads S out of others' processes, where slots cost S written into them
// and S read; but the kernel finds each page anew. Which is faster is tried. No rank writes into
// another's memory. The ranks have met.
#pragma once

#include <vector>

#include "shared/buffer_exchange.h"

namespace pycomm {

class RemoteReadTask final : public FlagTask {
 public:
  RemoteReadTask(Engine& engine, SharedMemoryRegion& region, const SharedJob& job,
                 const Header& header, std::vector<RemoteBuffer> buffers);

  bool advance() override;
  bool done() const override { return ended_; }

 private:
  // What this rank reads of a peer's in the end, and where to.
  struct Take {
    uint64_t from = 0;
    std::byte* into = nullptr;
    size_t bytes = 0;
  };
  const RemoteBuffer& of(int rank) const { return buffers_[static_cast<size_t>(rank)]; }
  int peer(int turn) const { return (rank_ + turn) % size_; }
  bool sum_more();
  Take take_from(int peer) const;
  bool collect_more();
  void keep_own_row();
  bool have_all_read();
  void count();
  bool pull(int peer, uint64_t from, std::byte* into, size_t bytes);

  const SharedJob& job_;
  std::vector<RemoteBuffer> buffers_;    // by rank
  size_t begin_ = 0, at_ = 0, end_ = 0;  // elements that this rank sums, and has summed
  int turn_ = 1;                         // whose array is read now: peer(turn_)
  size_t taken_ = 0;                     // bytes of it
  bool published_ = false, shown_ = false, ended_ = false;
};

}  // namespace pycomm
