// Runs plans and NCCL's own collectives on a communication stream, between events of the caller's
// stream. Nothing here waits for the device.
//
// A plan may be cut into lanes, which run at the same time, each on a stream and a communicator of
// its own: what one adds does not hold up what another sends.
//
//   caller   ... x is ready | event                       event | what uses the result ...
//   lane 0                    wait | event | stages | wait | event
//   lane 1                           wait  | stages | event
//
// Not a group: it checks nothing and watches nothing. Called by group/device_group.cpp.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <vector>

#include "core/deadline.h"
#include "core/operation.h"
#include "device/device.h"
#include "device/stages.h"
#include "nccl/communicator.h"

namespace pycomm {

// A call in the engine's words. Arrays lie on the device. Without a plan it is a call of NCCL's
// own, which has_nccl() knows.
struct StreamJob {
  const std::vector<Stages>* plan = nullptr;  // by lane, in as many as it has
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
  // Collective: communicators of `size` ranks on `device`. A group of one needs none.
  StreamEngine(std::shared_ptr<NcclApi> nccl, std::shared_ptr<Device> device, int rank, int size);
  ~StreamEngine();  // aborts what is under way
  StreamEngine(const StreamEngine&) = delete;
  StreamEngine& operator=(const StreamEngine&) = delete;

  // Makes a lane for each id.
  void meet(std::span<const NcclId> ids, const Deadline& deadline);

  // Before enqueue(): sees to the job's scratch. `caller` is the stream of the call; throws
  // Unsupported where that is being captured and there is too little.
  void prepare(const StreamJob& job, void* caller);
  // Enqueues the job behind `before`, an event of the caller's stream; gives the event of its end.
  // Throws as Communicator::launch does. This and prepare(): one thread at a time.
  std::shared_ptr<Event> enqueue(const StreamJob& job, Event& before, const Deadline& deadline);

  // By lane; none in a group of one, and before meet().
  std::vector<Communicator*> communicators();
  std::shared_ptr<Event> event() { return events_->take(); }
  Device& device() { return *device_; }
  const StreamTraffic& traffic() const { return traffic_; }

 private:
  struct Lane {
    explicit Lane(const std::shared_ptr<Device>& device) : stream(device) {}
    Stream stream;
    std::unique_ptr<Communicator> communicator{};  // none in a group of one
  };
  // A job as one lane runs it.
  struct Part {
    const StreamJob& job;
    Lane& lane;
    std::byte* scratch;
  };
  void run(const StreamJob& job, const Deadline& deadline);
  void run_stage(const Part& part, const Stage& stage, const Deadline& deadline);
  void run_step(const Part& part, const Stage::Step& step);
  void reduce(const Part& part, const Stage::Step& step);
  void run_nccl(const StreamJob& job, const Deadline& deadline);
  static std::byte* place(const Part& part, const Range& range);
  void reserve(size_t bytes, void* caller);

  std::shared_ptr<NcclApi> nccl_;
  std::shared_ptr<Device> device_;
  int rank_, size_;
  std::vector<std::unique_ptr<Lane>> lanes_;  // at least one
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
