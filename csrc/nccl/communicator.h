// An NCCL communicator whose waits can be cancelled. It ends with close() or, during calls, with
// abort().
#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <string>

#include "core/deadline.h"
#include "core/errors.h"
#include "nccl/nccl.h"

namespace pycomm::nccl {

// The ranks connect in a nonblocking communicator, so that the wait for a missing rank can end.
// Calls run on a blocking child of it, as NCCL starts a thread for each group of calls on a
// nonblocking one. A call on the child may wait for other ranks too; an abort of the parent, which
// shares its abort flag with the child, ends that wait. The child itself must not be aborted before
// its calls have returned. Thread-safe.
class Communicator {
 public:
  // Begins to connect to the other ranks on the thread's current device; connect() waits for them.
  // `max_ctas`: as in NcclOptions. Throws as launch() does.
  Communicator(NcclApi& nccl, const NcclId& id, int rank, int size, int max_ctas = 0);
  ~Communicator() { abort(); }
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  // Call it once, before launch(). Throws Timeout if ranks are missing.
  void connect(const Deadline& deadline);

  // Runs calls of NcclApi as one group, which is enqueued when this returns. Waits for the other
  // ranks where NCCL connects to them first, until abort(). Throws error_of() of a result, also if
  // abort() comes before that.
  using Calls = std::function<NcclResult(NcclApi&, NcclComm*)>;
  void launch(const Calls& calls);

  // The state of enqueued calls: success unless one failed. An error after abort() or close().
  NcclResult state();
  // PeerLost or Timeout if NCCL reports that, otherwise GroupBroken.
  Error error_of(const std::string& function, NcclResult result);

  // Call it before a call that a CUDA graph captures. NCCL ends a communicator only after the last
  // graph that captured its calls, and waits for that; so close() keeps the communicator
  // permanently.
  void keep_for_graph() { captured_ = true; }

  // Call once all enqueued calls are complete. May block as abort() does.
  void close() noexcept;
  // Ends calls in progress at once. May block long after that: as long as a graph lives that
  // captured calls, or the stream of a call is busy with earlier work. Other functions do not wait
  // for it.
  void abort() noexcept;

 private:
  void wait_until_ready(const std::string& function, const Deadline& deadline);
  NcclComm* begin_call();
  void end_call();

  NcclApi& nccl_;
  const int rank_, max_ctas_;
  std::mutex mutex_;  // guards the members below
  std::condition_variable returned_;
  int calls_ = 0;  // that have not returned from NCCL
  bool ended_ = false;
  NcclComm* parent_ = nullptr;
  NcclComm* child_ = nullptr;  // NCCL sets it while connect() waits
  std::atomic<bool> captured_ = false;
};

}  // namespace pycomm::nccl
