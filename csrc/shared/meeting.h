// How a call on larger arrays begins: each rank says where its arrays lie, and from what all have
// said all find the same way for the call.
//
//   mapped   all arrays that others work on lie in heaps, which all have mapped    mapped_run.h
//   pulled   ranks may read each other's processes, and do                         pulled_run.h
//   staged   through slots                                                         shared_run.h
//
// Where slots and reading are both possible the lowest rank chooses for all: it tries both now and
// then. Called by shared_call.h.
#pragma once

#include <sys/types.h>

#include <vector>

#include "shared/flag_task.h"

namespace pycomm {

enum class Way { mapped, pulled, staged };

// Where a rank's arrays lie: as mapped here, if they are, and in its own process.
struct Offered {
  const std::byte* input = nullptr;
  std::byte* output = nullptr;
  uint64_t input_at = 0, output_at = 0;
  pid_t process = 0;
};

class Meeting final : public FlagTask {
 public:
  // Whether a call begins so; all find the same.
  static bool is_held(const SharedJob& job, const Arena& arena);

  // `prefers_pulled`: what the lowest rank chooses where both ways are possible.
  Meeting(Engine& engine, Arena& arena, const SharedJob& job, const Header& header,
          bool prefers_pulled);

  bool advance() override;
  bool done() const override { return met_; }
  // Once it is done.
  Way way() const { return way_; }
  bool could_be_pulled() const { return could_be_pulled_; }
  const std::vector<Offered>& places() const { return places_; }

 private:
  struct Needed;
  struct Offer;
  bool are_readable(const Needed& needed) const;
  void offer();
  Offer offer_of(int peer) const;
  Offered place_of(int peer, const Offer& offer) const;
  void heed_all();
  bool reaches_all() const;

  const SharedJob& job_;
  bool prefers_pulled_;
  bool offered_ = false, met_ = false, could_be_pulled_ = false;
  Way way_ = Way::staged;
  std::vector<Offered> places_;  // by rank
};

}  // namespace pycomm
