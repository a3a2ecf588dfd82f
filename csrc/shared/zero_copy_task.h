// A call on arrays in heaps, which all ranks of the host have mapped: each rank reads its peers'
// arrays directly, without staging.
//
//   all_reduce, two ranks    rank 0                          rank 1
//     work                   piece 0 of both -> both         piece 1 of both -> both
//     end                    when all ranks have ended their work
//
//   operation        must be mapped          a rank's work
//   all_reduce       all inputs and outputs  adds up its piece, writes it into all outputs
//   broadcast        all outputs             copies its piece of the root's into all others
//   all_gather       all inputs              copies all inputs into its output
//   reduce_scatter   all inputs              adds up its row of all inputs
//
// An all_reduce of S bytes reads S and writes S in each rank. A rank stops writing into the array
// of a peer that aborted the call, at the latest after the current step. The ranks have completed
// the buffer exchange.
#pragma once

#include <vector>

#include "shared/buffer_exchange.h"
#include "shared/nontemporal_copy.h"

namespace pycomm::shared {

class ZeroCopyTask final : public FlagTask {
 public:
  ZeroCopyTask(engine::Engine& engine, SharedMemoryRegion& region, const engine::Job& job,
               std::vector<RemoteBuffer> buffers);

  bool advance() override;
  bool done() const override { return ended_; }

 private:
  const RemoteBuffer& of(int rank) const { return buffers_[static_cast<size_t>(rank)]; }
  void work_more();
  void add_up_piece(size_t begin, size_t count);
  void copy_to_outputs(const std::byte* from, size_t begin, size_t bytes, int owner);
  void gather(size_t begin, size_t bytes);

  std::vector<RemoteBuffer> buffers_;  // by rank
  bool published_ = false, ended_ = false;
  size_t at_ = 0, end_;  // remaining elements of this rank's work
  OutputCopy to_output_;
};

}  // namespace pycomm::shared
