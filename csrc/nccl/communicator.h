// One NCCL communicator: made without blocking, so that a rank that never comes, or a call that
// hangs, can be given up; ended by close() or, whatever is under way, by abort().
//
// Not what decides to abort: whoever calls does. Used by device/stream_engine.cpp.
#pragma once

#include <functional>
#include <mutex>
#include <string>

#include "core/deadline.h"
#include "core/errors.h"
#include "nccl/nccl.h"

namespace pycomm {

// Any thread may call any of these.
class Communicator {
 public:
  // Begins to meet the others on the thread's current device; meet() waits for them. Throws as
  // launch() does.
  Communicator(NcclApi& nccl, const NcclId& id, int rank, int size);
  ~Communicator() { abort(); }
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  // Throws Timeout when ranks are missing.
  void meet(const Deadline& deadline);

  // Calls of NcclApi, as one group, enqueued when this returns. Throws what error_of() makes of a
  // result, GroupBroken after abort(), Timeout if NCCL is not through with the enqueueing.
  using Calls = std::function<NcclResult(NcclApi&, NcclComm*)>;
  void launch(const Calls& calls, const Deadline& deadline);

  // What became of calls that were enqueued: success as long as nothing did.
  NcclResult state();
  // PeerLost where NCCL says that a rank has gone, Timeout where it says so, else GroupBroken.
  Error error_of(const std::string& function, NcclResult result);

  // When all that was enqueued is over. What is not through by the deadline is aborted.
  void close(const Deadline& deadline) noexcept;
  void abort() noexcept;

 private:
  NcclResult settle(const Deadline& deadline);

  NcclApi& nccl_;
  const int rank_;
  std::mutex mutex_;  // guards comm_ against its end
  NcclComm* comm_ = nullptr;
};

}  // namespace pycomm
