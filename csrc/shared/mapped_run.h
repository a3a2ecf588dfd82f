// A call on arrays that the other ranks of the host have mapped, because they lie in heaps: each
// rank takes what it needs out of the others' arrays, and nothing is staged.
//
//   all_reduce, two ranks    rank 0                          rank 1
//     offer                  where its arrays lie            where its arrays lie
//     work                   piece 0 of both -> both         piece 1 of both -> both
//     end                    when everybody has ended its work
//
//   operation        must be mapped          a rank's work
//   all_reduce       all inputs and outputs  adds up its piece, writes it into all outputs
//   broadcast        all outputs             copies its piece of the root's into all others
//   all_gather       all inputs              copies all inputs into its output
//   reduce_scatter   all inputs              adds up its row of all inputs
//
// An all_reduce of S bytes reads S and writes S in each rank. Where one rank has a private array
// that must be mapped nothing is done here, all ranks know it by the offers, and SharedRun carries
// out the call. Nothing is written before every rank's signature was seen, and nothing into an
// array whose rank has given the call up, but for the step in which it did so.
#pragma once

#include <vector>

#include "shared/flag_task.h"

namespace pycomm {

class MappedRun final : public FlagTask {
 public:
  // Whether ranks make offers in such a call; all find the same.
  static bool may_carry_out(const SharedJob& job, const Arena& arena);

  MappedRun(Engine& engine, Arena& arena, const SharedJob& job, const Header& header);
  ~MappedRun() override;
  MappedRun(const MappedRun&) = delete;
  MappedRun& operator=(const MappedRun&) = delete;

  bool advance() override;
  bool done() const override { return ended_; }
  // Whether some rank's array is not to be mapped: nothing was done, and nothing will be.
  bool refused() const { return refused_; }

 private:
  struct Place {
    const std::byte* input;
    std::byte* output;
  };
  const Place& of(int rank) const { return places_[static_cast<size_t>(rank)]; }
  void offer();
  void heed(int peer);
  bool are_all_here();
  void work_more();
  void add_up_piece(size_t begin, size_t count);
  void spread(const std::byte* from, size_t begin, size_t bytes, int owner);
  void gather(size_t begin, size_t bytes);

  const SharedJob& job_;
  bool offered_ = false, met_ = false, told_ = false, refused_ = false, ended_ = false;
  std::vector<Place> places_;  // by rank; what need not be mapped is null
  size_t at_ = 0, end_;        // elements of this rank's work that are still to do
};

}  // namespace pycomm
