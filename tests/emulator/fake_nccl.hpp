// A stand-in for NCCL between threads or processes of one machine, over the emulated runtime.
//
// It does what NCCL's documents promise and no more, and refuses what they forbid: a communicator
// that does not block is asked until it is through before it takes the next call, a handle that is
// gone is no handle, ranks have devices of their own, the calls of a group stand on one stream. A
// send waits for its receive, counts and dtypes are compared, a rank that dies gives remote_error,
// an abort ends what is under way. As with NCCL, a rank that never comes is waited for without end.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "nccl/nccl.h"

namespace fake_nccl {

// What went through it. `groups` are launches: what one group_end put on a stream.
struct Counts {
  uint64_t groups = 0, sends = 0, receives = 0, bytes_sent = 0, collectives = 0;
};

class FakeNccl final : public pycomm::NcclApi {
 public:
  FakeNccl();
  ~FakeNccl() override;
  // Since the last call; of operations that have begun on their stream.
  Counts take_counts();

  int version() const override { return 23203; }
  std::string origin() const override { return "tests/emulator"; }
  std::string error_string(pycomm::NcclResult result) override;
  std::string last_error(pycomm::NcclComm* comm) override;
  pycomm::NcclResult get_unique_id(pycomm::NcclId& id) override;
  pycomm::NcclResult comm_init_rank(pycomm::NcclComm*& comm, int size, const pycomm::NcclId& id,
                                    int rank, bool blocking) override;
  pycomm::NcclResult comm_finalize(pycomm::NcclComm* comm) override;
  pycomm::NcclResult comm_destroy(pycomm::NcclComm* comm) override;
  pycomm::NcclResult comm_abort(pycomm::NcclComm* comm) override;
  pycomm::NcclResult comm_async_error(pycomm::NcclComm* comm, pycomm::NcclResult& error) override;
  pycomm::NcclResult group_start() override;
  pycomm::NcclResult group_end() override;
  pycomm::NcclResult send(pycomm::NcclData data, int peer, pycomm::NcclQueue queue) override;
  pycomm::NcclResult recv(pycomm::NcclData data, int peer, pycomm::NcclQueue queue) override;
  pycomm::NcclResult all_reduce(pycomm::NcclData data, pycomm::NcclOp op,
                                pycomm::NcclQueue queue) override;
  pycomm::NcclResult all_gather(pycomm::NcclData data, pycomm::NcclQueue queue) override;
  pycomm::NcclResult reduce_scatter(pycomm::NcclData data, pycomm::NcclOp op,
                                    pycomm::NcclQueue queue) override;
  pycomm::NcclResult broadcast(pycomm::NcclData data, int root, pycomm::NcclQueue queue) override;

 private:
  struct State;
  std::shared_ptr<State> state_;  // operations that are under way hold it too
};

}  // namespace fake_nccl
