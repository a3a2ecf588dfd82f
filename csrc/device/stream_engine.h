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
// Messages of a stage go by the lane's communicator, or, to ranks that it does not join, by the
// lane's staging channel.
//
// Not a group: it checks nothing and watches nothing. Called by group/device_group.cpp.
#pragma once

#include <chrono>
#include <cstddef>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/deadline.h"
#include "core/operation.h"
#include "device/device.h"
#include "device/growable_buffer.h"
#include "device/host_staging_channel.h"
#include "device/stages.h"
#include "nccl/communicator.h"

namespace pycomm {

// A call in the engine's words. Arrays lie on the device. Without a plan it is a call of NCCL's
// own, which has_nccl() knows.
struct StreamJob {
  const std::vector<StreamStages>* plan = nullptr;  // by lane, in as many as it has
  Operation operation = Operation::barrier;
  Dtype dtype = Dtype::uint8;
  ReduceOp op = ReduceOp::sum;
  const std::byte* input = nullptr;
  std::byte* output = nullptr;
  size_t count = 0;                     // as in plan.h
  int peer = 0;                         // as in Call
  std::chrono::nanoseconds timeout{0};  // of messages that staging channels send
};

// Ranks that the communicators do not join, if there are any.
struct RemoteRanks {
  // By rank: its rank in the communicators, or kNoRank; empty: all are.
  std::vector<int> local_ranks{};
  std::vector<std::unique_ptr<HostTransport>> transports{};  // of each lane, to the others
};

// Whether NCCL does this by itself: messages, all_reduce, broadcast, all_gather, reduce_scatter; no
// bits, no bool and no int16 in reductions.
bool has_nccl(Operation operation, Dtype dtype, ReduceOp op);

// Launches and bytes of the calls so far. Groups are of messages that travel at once: one of
// NCCL's, or of a staging channel.
struct StreamTraffic {
  uint64_t groups = 0, bytes_sent = 0, kernels = 0;
};

class StreamEngine {
 public:
  // Of `size` ranks, each on a device. A group of one needs no communicator.
  StreamEngine(std::shared_ptr<NcclApi> nccl, std::shared_ptr<Device> device, int rank, int size);
  ~StreamEngine();  // aborts what is under way
  StreamEngine(const StreamEngine&) = delete;
  StreamEngine& operator=(const StreamEngine&) = delete;

  // Collective: makes a lane for each id. A rank without peers in its communicators needs no NCCL.
  void meet(std::span<const NcclId> ids, RemoteRanks remote, const Deadline& deadline);

  // Before enqueue(): sees to the job's memory. `caller` is the stream of the call; throws
  // Unsupported where that is being captured and there is too little.
  void prepare(const StreamJob& job, void* caller);
  // Enqueues the job behind `before`, an event of the caller's stream; gives the event of its end.
  // Throws as Communicator::launch does. This and prepare(): one thread at a time.
  std::shared_ptr<Event> enqueue(const StreamJob& job, Event& before, const Deadline& deadline);

  // By lane; none where a rank has no peers in communicators, and before meet().
  std::vector<Communicator*> communicators();
  size_t lanes() const { return lanes_.size(); }
  bool reaches_all() const { return local_ranks_.empty(); }  // whether communicators join all ranks
  // From any thread, after meet(): why messages between hosts have not arrived.
  std::optional<Error> trouble();
  void abort(const std::string& reason) noexcept;
  void close(const Deadline& deadline) noexcept;  // when all that was enqueued is over
  std::shared_ptr<Event> event() { return events_->take(); }
  Device& device() { return *device_; }
  const StreamTraffic& traffic() const { return traffic_; }

 private:
  struct Lane {
    explicit Lane(const std::shared_ptr<Device>& device) : stream(device) {}
    Stream stream;
    std::unique_ptr<Communicator> communicator{};   // none where it would join one rank
    std::unique_ptr<HostStagingChannel> staging{};  // none where it joins all ranks
  };
  // A job as one lane runs it.
  struct LaneJob {
    const StreamJob& job;
    Lane& lane;
    std::byte* scratch;
  };
  void run(const StreamJob& job, const Deadline& deadline);
  void run_stage(const LaneJob& lane_job, const StreamStage& stage, const Deadline& deadline);
  void launch(const LaneJob& lane_job, const StreamStage& stage, const Deadline& deadline);
  std::vector<HostMessage> messages_of(const LaneJob& lane_job, const StreamStage& stage) const;
  size_t staged_bytes(const StreamStages& stages, Dtype dtype) const;
  static StreamStage message_of(const StreamJob& job);
  void run_step(const LaneJob& lane_job, const StreamStage::Step& step);
  void reduce(const LaneJob& lane_job, const StreamStage::Step& step);
  void run_nccl(const StreamJob& job, const Deadline& deadline);  // a collective
  static std::byte* place(const LaneJob& lane_job, const Range& range);
  // In the communicators, or kNoRank; so of a rank that is not known yet.
  int local_rank(int rank) const {
    return local_ranks_.empty() || rank < 0 ? rank : local_ranks_[static_cast<size_t>(rank)];
  }

  std::shared_ptr<NcclApi> nccl_;
  std::shared_ptr<Device> device_;
  int rank_, size_;
  std::vector<int> local_ranks_;  // as in RemoteRanks
  std::shared_ptr<EventPool> events_;
  GrowableBuffer scratch_;
  StreamTraffic traffic_;
  std::vector<std::unique_ptr<Lane>> lanes_;  // at least one; the last: it ends before what it uses
};

}  // namespace pycomm
