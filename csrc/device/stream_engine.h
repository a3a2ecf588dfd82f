// Runs plans and NCCL's own collectives on a communication stream, between events of the caller's
// stream. Nothing here waits for the device.
//
// Not a group: it checks nothing and watches nothing. Called by group/device_group.cpp.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "core/deadline.h"
#include "core/operation.h"
#include "device/device.h"
#include "device/stages.h"
#include "nccl/communicator.h"

namespace pycomm {

// A call in the engine's words. Arrays lie on the device. Without stages it is a call of NCCL's
// own, which has_nccl() knows.
struct StreamJob {
  const Stages* stages = nullptr;
  Operation operation = Operation::barrier;
  Dtype dtype = Dtype::uint8;
  ReduceOp op = ReduceOp::sum;
  const std::byte* input = nullptr;
  std::byte* output = nullptr;
  size_t count = 0;  // as in plan.h
  int peer = 0;      // as in Call
};

// Whether NCCL does this by itself: messages, all_reduce, broadcast, all_gather, reduce_scatter; no
// bits, no bool and no int16 in reductions.
bool has_nccl(Operation operation, Dtype dtype, ReduceOp op);

// Launches and bytes of the calls so far.
struct StreamTraffic {
  uint64_t groups = 0, bytes_sent = 0, kernels = 0;
};

class StreamEngine {
 public:
  // Collective: a communicator of `size` ranks on `device`. A group of one needs none.
  StreamEngine(std::shared_ptr<NcclApi> nccl, std::shared_ptr<Device> device, int rank, int size);
  ~StreamEngine();  // aborts what is under way
  StreamEngine(const StreamEngine&) = delete;
  StreamEngine& operator=(const StreamEngine&) = delete;

  void meet(const NcclId& id, const Deadline& deadline);

  // Before enqueue(): sees to the job's scratch. `caller` is the stream of the call; throws
  // Unsupported where that is being captured and there is too little.
  void prepare(const StreamJob& job, void* caller);
  // Enqueues the job behind `before`, an event of the caller's stream; gives the event of its end.
  // Throws as Communicator::launch does. This and prepare(): one thread at a time.
  std::shared_ptr<Event> enqueue(const StreamJob& job, Event& before, const Deadline& deadline);

  Communicator* communicator() { return communicator_.get(); }
  std::shared_ptr<Event> event() { return events_->take(); }
  Device& device() { return *device_; }
  const StreamTraffic& traffic() const { return traffic_; }

 private:
  void run(const StreamJob& job, const Deadline& deadline);
  void run_stage(const StreamJob& job, const Stage& stage, const Deadline& deadline);
  void run_step(const StreamJob& job, const Stage::Step& step);
  void reduce(const StreamJob& job, const Stage::Step& step);
  void run_nccl(const StreamJob& job, const Deadline& deadline);
  std::byte* place(const StreamJob& job, const Range& range) const;
  void reserve(size_t bytes, void* caller);

  std::shared_ptr<NcclApi> nccl_;
  std::shared_ptr<Device> device_;
  int rank_, size_;
  std::unique_ptr<Communicator> communicator_;
  Stream stream_;
  std::shared_ptr<EventPool> events_;
  // The last block is in use. Older ones stay, for graphs may hold their addresses; each is at
  // least twice as large as the one before, so all together take at most twice the last.
  struct Release {
    std::shared_ptr<Device> device;
    void operator()(void* memory) const { device->release(memory); }
  };
  std::vector<std::unique_ptr<void, Release>> scratch_;
  size_t scratch_bytes_ = 0;
  StreamTraffic traffic_;
};

}  // namespace pycomm
