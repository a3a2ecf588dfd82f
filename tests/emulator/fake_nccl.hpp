// A stand-in for NCCL between threads or processes of one machine, over the emulated runtime.
//
// It gives only the guarantees of NCCL's documentation, and refuses what that forbids. A
// non-blocking communicator must be polled to completion before its next call, a destroyed handle
// is invalid, each rank has its own device, and the calls of a group use one stream. Calls need a
// blocking communicator; a child has the abort flag of its parent. The first collective of a
// communicator, and the first message of two ranks, wait for the peers where they are enqueued. A
// send waits for its receive, counts and dtypes are compared, a dead rank gives remote_error, and
// an abort ends running operations, but returns only when the streams are idle and no graph has
// calls. As with NCCL, the wait for a missing rank has no limit. Stricter than NCCL: two ranks that
// enqueue collectives of several communicators in different orders get invalid_usage.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>

#include "nccl/nccl.h"

namespace fake_nccl {

// Counters. `groups` are launches: one for each group_end that enqueued work. `misaligned` are
// messages at an address that is no multiple of 16: NCCL copies them byte by byte.
struct Counts {
  uint64_t groups = 0, sends = 0, receives = 0, bytes_sent = 0, collectives = 0, misaligned = 0;
};

// Calls wait a random time before they are enqueued, at most so long, as on a busy machine. 0:
// none.
void delay_calls(std::chrono::microseconds most);

// How many threads of this process wait in a first call for their peers.
int waiting_calls();

class FakeNccl final : public pycomm::nccl::NcclApi {
 public:
  FakeNccl();
  ~FakeNccl() override;
  // Since the last call; of operations that have begun on their stream.
  Counts take_counts();

  int version() const override { return 23203; }
  std::string origin() const override { return "tests/emulator"; }
  std::string error_string(pycomm::nccl::NcclResult result) override;
  std::string last_error() override;
  pycomm::nccl::NcclResult get_unique_id(pycomm::nccl::NcclId& id) override;
  pycomm::nccl::NcclResult comm_init_rank(pycomm::nccl::NcclComm*& comm, int size,
                                          const pycomm::nccl::NcclId& id, int rank,
                                          pycomm::nccl::NcclOptions options) override;
  pycomm::nccl::NcclResult comm_split(pycomm::nccl::NcclComm* parent, int rank,
                                      pycomm::nccl::NcclComm*& child,
                                      pycomm::nccl::NcclOptions options) override;
  pycomm::nccl::NcclResult comm_destroy(pycomm::nccl::NcclComm* comm) override;
  pycomm::nccl::NcclResult comm_abort(pycomm::nccl::NcclComm* comm) override;
  pycomm::nccl::NcclResult comm_async_error(pycomm::nccl::NcclComm* comm,
                                            pycomm::nccl::NcclResult& error) override;
  pycomm::nccl::NcclResult group_start() override;
  pycomm::nccl::NcclResult group_end() override;
  pycomm::nccl::NcclResult send(pycomm::nccl::NcclData data, int peer,
                                pycomm::nccl::NcclQueue queue) override;
  pycomm::nccl::NcclResult recv(pycomm::nccl::NcclData data, int peer,
                                pycomm::nccl::NcclQueue queue) override;
  pycomm::nccl::NcclResult all_reduce(pycomm::nccl::NcclData data, pycomm::nccl::NcclOp op,
                                      pycomm::nccl::NcclQueue queue) override;
  pycomm::nccl::NcclResult all_gather(pycomm::nccl::NcclData data,
                                      pycomm::nccl::NcclQueue queue) override;
  pycomm::nccl::NcclResult reduce_scatter(pycomm::nccl::NcclData data, pycomm::nccl::NcclOp op,
                                          pycomm::nccl::NcclQueue queue) override;
  pycomm::nccl::NcclResult broadcast(pycomm::nccl::NcclData data, int root,
                                     pycomm::nccl::NcclQueue queue) override;

 private:
  struct State;
  std::shared_ptr<State> state_;  // running operations hold it too
};

}  // namespace fake_nccl
