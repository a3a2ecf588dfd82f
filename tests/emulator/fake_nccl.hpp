// A stand-in for NCCL between threads or processes of one machine, over the emulated runtime.
//
// It gives only the guarantees of NCCL's documentation, and refuses what that forbids. A
// non-blocking communicator must be polled to completion before its next call, a destroyed handle
// is invalid, each rank has its own device, and the calls of a group use one stream. A send waits
// for its receive, counts and dtypes are compared, a dead rank gives remote_error, and an abort
// ends running operations. As with NCCL, the wait for a missing rank has no limit.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "nccl/nccl.h"

namespace fake_nccl {

// Counters. `groups` are launches: one for each group_end that enqueued work.
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
  std::shared_ptr<State> state_;  // running operations hold it too
};

}  // namespace fake_nccl
