// One nonblocking NCCL communicator, so that waits for a missing rank or a hanging call can be
// cancelled. It ends with close() or, during calls, with abort().
#pragma once

#include <atomic>
#include <functional>
#include <mutex>
#include <string>

#include "core/deadline.h"
#include "core/errors.h"
#include "nccl/nccl.h"

namespace pycomm::nccl {

// Thread-safe.
class Communicator {
 public:
  // Begins to connect to the other ranks on the thread's current device; meet() waits for them.
  // Throws as launch() does.
  Communicator(NcclApi& nccl, const NcclId& id, int rank, int size);
  ~Communicator() { abort(); }
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  // Throws Timeout if ranks are missing.
  void meet(const Deadline& deadline);

  // Runs calls of NcclApi as one group, which is enqueued when this returns. Throws error_of() of a
  // result, also if abort() comes before that, or Timeout if NCCL does not finish enqueueing.
  using Calls = std::function<NcclResult(NcclApi&, NcclComm*)>;
  void launch(const Calls& calls, const Deadline& deadline);

  // The state of enqueued calls: success unless one failed. An error after abort() or close().
  NcclResult state();
  // PeerLost or Timeout if NCCL reports that, otherwise GroupBroken.
  Error error_of(const std::string& function, NcclResult result);

  // Call it before a call that a CUDA graph captures. NCCL ends a communicator only after the last
  // graph that captured its calls, and waits for that; so close() keeps the communicator
  // permanently.
  void keep_for_graph() { captured_ = true; }

  // Call once all enqueued calls are complete. If it returns false, abort() has to follow.
  bool close(const Deadline& deadline) noexcept;
  // Ends calls in progress at once. May block long after that: as long as a graph lives that
  // captured calls, or the stream of a call is busy with earlier work. Other functions do not wait
  // for it.
  void abort() noexcept;

 private:
  NcclResult enqueue(const Calls& calls);
  NcclResult settle(const Deadline& deadline);
  NcclComm* current();
  NcclComm* take();

  NcclApi& nccl_;
  const int rank_;
  std::mutex mutex_;  // guards comm_ against destruction
  NcclComm* comm_ = nullptr;
  std::atomic<bool> captured_ = false;
};

}  // namespace pycomm::nccl
