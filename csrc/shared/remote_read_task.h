// A call on arrays at any address, where the ranks of a host may read each other's processes: each
// rank reads directly from its peers' arrays, without staging.
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
// An all_reduce of S bytes reads S bytes from other processes; slots would write S and read S. But
// the kernel looks up each page again, so the faster mode is measured. No rank writes into
// another's memory. The ranks have completed the buffer exchange.
#pragma once

#include <vector>

#include "shared/buffer_exchange.h"

namespace pycomm::shared {

class RemoteReadTask final : public FlagTask {
 public:
  RemoteReadTask(engine::Engine& engine, SharedMemoryRegion& region, const SharedJob& job,
                 const transport::Header& header, std::vector<RemoteBuffer> buffers);

  bool advance() override;
  bool done() const override { return ended_; }

 private:
  // Data that this rank collects from a peer, and its destination.
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
  void copy_own_row();
  bool have_all_read();
  void count();
  bool read_from(int peer, uint64_t from, std::byte* into, size_t bytes);

  const SharedJob& job_;
  std::vector<RemoteBuffer> buffers_;    // by rank
  size_t begin_ = 0, at_ = 0, end_ = 0;  // elements this rank sums; at_: the next one
  int turn_ = 1;                         // reads the array of peer(turn_)
  size_t taken_ = 0;                     // bytes read of it
  bool published_ = false, shown_ = false, ended_ = false;
};

}  // namespace pycomm::shared
