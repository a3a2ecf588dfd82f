// An all_reduce of arrays that every rank of the host has mapped, because they lie in heaps: each
// rank adds up its piece out of all arrays and writes it into all of them. Nothing is staged.
//
//   two ranks            rank 0                          rank 1
//     offer              where its array lies            where its array lies
//     add up             piece 0 of both -> both         piece 1 of both -> both
//     end                when everybody has written
//
// Each element is read once by one rank and written once into each array: of S bytes a rank reads
// and writes S each. Arrays that do not lie in a heap cannot be offered: where one rank has such a
// one nothing is done here, all ranks know it by the offers, and SharedRun carries out the call.
// Nothing is written before every rank's signature was seen, and nothing into an array whose rank
// has given the call up, but for the step in which it did so.
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
  void offer();
  void heed(int peer);
  bool are_all_here();
  void add_up_more();

  const SharedJob& job_;
  bool offered_ = false, met_ = false, told_ = false, refused_ = false, ended_ = false;
  std::vector<Place> places_;  // by rank
  size_t at_, end_;            // elements of this rank's piece that are still to do
};

}  // namespace pycomm
