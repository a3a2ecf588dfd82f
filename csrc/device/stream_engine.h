// Runs plans and NCCL collectives on a communication stream, between events of the caller's stream.
// No function here waits for the device.
//
// A plan may be split into channels, which run concurrently, each with its own stream and
// communicator: one channel reduces while another sends.
//
//   caller      ... x is ready | event                       event | what uses the result ...
//   channel 0                    wait | event | stages | wait | event
//   channel 1                           wait  | stages | event
//
// Messages of a stage use the channel's communicator, or, for ranks outside it, its host staging.
//
// It does no validation and no failure detection; device_group/device_group.cpp does.
#pragma once

#include <chrono>
#include <cstddef>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "core/deadline.h"
#include "core/operation.h"
#include "device/detached_calls.h"
#include "device/device.h"
#include "device/growable_buffer.h"
#include "device/host_gate.h"
#include "device/host_staging_channel.h"
#include "device/stages.h"
#include "nccl/communicator.h"

namespace pycomm::device {

// A collective. Arrays are on the device. Without a plan it is one of NCCL, for which has_nccl() is
// true.
struct StreamJob {
  const std::vector<StreamStages>* plan = nullptr;  // by channel
  Operation operation = Operation::barrier;
  Dtype dtype = Dtype::uint8;
  ReduceOp op = ReduceOp::sum;
  const std::byte* input = nullptr;
  std::byte* output = nullptr;
  size_t count = 0;                     // as in plan.h
  int peer = 0;                         // as in Call
  std::chrono::nanoseconds timeout{0};  // of the staging channels
  std::shared_ptr<HostGate> gate{};     // later work begins after the gate; null: none
};

// Ranks outside the communicators, if any.
struct RemoteRanks {
  // By rank: its rank in the communicators, or kNoRank. Empty: the communicators join all ranks.
  std::vector<int> local_ranks{};
  std::vector<std::unique_ptr<HostTransport>> transports{};  // by channel, to the others
};

// Whether NCCL implements it: messages, all_reduce, broadcast, all_gather, reduce_scatter. Its
// reductions have no bitwise operations, no bool and no int16.
bool has_nccl(Operation operation, Dtype dtype, ReduceOp op);

// Launches and bytes of all calls so far. A group is a set of concurrent messages: one NCCL group,
// or one exchange of a staging channel.
struct StreamTraffic {
  uint64_t groups = 0, bytes_sent = 0, kernels = 0;
};

class StreamEngine {
 public:
  // For `size` ranks, each on a device. A group of one needs no communicator.
  StreamEngine(std::shared_ptr<nccl::NcclApi> nccl, std::shared_ptr<Device> device, int rank,
               int size);
  ~StreamEngine();  // aborts running calls; waits a short time for that
  StreamEngine(const StreamEngine&) = delete;
  StreamEngine& operator=(const StreamEngine&) = delete;

  // Collective: creates a channel for each id. A rank without peers in its communicators needs no
  // NCCL.
  void connect(std::span<const nccl::NcclId> ids, RemoteRanks remote, const Deadline& deadline);

  // Call it before enqueue(): allocates the job's memory. Throws Unsupported if memory would have
  // to grow while `caller`, the stream of the call, is being captured.
  void prepare(const StreamJob& job, void* caller);
  // Enqueues the job after `before`, an event of the caller's stream; returns the event of its end.
  // Throws as Communicator::launch does. prepare() and enqueue() are not thread-safe.
  std::shared_ptr<Event> enqueue(const StreamJob& job, Event& before);
  // The same for messages, whose data is on the device. They are concurrent, as one group; those of
  // one peer and direction stay in order.
  void prepare(std::span<const PeerMessage> messages, void* caller);
  std::shared_ptr<Event> enqueue(std::span<const PeerMessage> messages,
                                 std::chrono::nanoseconds timeout, Event& before);
  // Whether a message to or from the peer does not wait for it on this thread: NCCL waits at the
  // first one of each direction.
  bool is_connected(int peer, bool sends) const;

  // By channel; none if a rank has no peers in communicators, and none before connect().
  std::vector<nccl::Communicator*> communicators();
  size_t channels() const { return channels_.size(); }
  bool reaches_all() const { return local_ranks_.empty(); }  // whether communicators join all ranks
  // Thread-safe, after connect(): the error of failed messages between hosts.
  std::optional<Error> async_error();
  void abort(const std::string& reason) noexcept;  // does not wait for NCCL
  // Call it when all enqueued work is done. Waits for NCCL until the deadline.
  void close(const Deadline& deadline) noexcept;
  std::shared_ptr<Event> event() { return events_->take(); }
  Device& device() { return *device_; }
  const StreamTraffic& traffic() const { return traffic_; }

 private:
  struct Channel {
    explicit Channel(const std::shared_ptr<Device>& device) : stream(device) {}
    Stream stream;
    std::shared_ptr<nccl::Communicator> communicator{};  // none if it would join one rank
    std::unique_ptr<HostStagingChannel> staging{};       // none if it joins all ranks
    std::shared_ptr<HostGate> gate{};                    // of the last job with one
    std::set<std::pair<int, bool>> connected{};          // peers and directions of messages so far
  };
  // A job as one channel runs it.
  struct ChannelJob {
    const StreamJob& job;
    Channel& channel;
    std::byte* scratch;
  };
  template <typename Body>
  std::shared_ptr<Event> enqueue_between(Event& before, const Body& body);
  void end_communicators(void (nccl::Communicator::*end)() noexcept) noexcept;
  void run(const StreamJob& job);
  void run_stage(const ChannelJob& channel_job, const StreamStage& stage);
  void exchange(Channel& channel, std::span<const PeerMessage> messages,
                std::chrono::nanoseconds timeout);
  void launch(Channel& channel, std::span<const PeerMessage> messages);
  void run_step(const ChannelJob& channel_job, const StreamStage::Step& step);
  void reduce(const ChannelJob& channel_job, const StreamStage::Step& step);
  void run_nccl(const StreamJob& job);  // a collective
  static std::byte* place(const ChannelJob& channel_job, const collectives::Range& range);

  std::shared_ptr<nccl::NcclApi> nccl_;
  std::shared_ptr<Device> device_;
  int rank_, size_;
  std::vector<int> local_ranks_;  // as in RemoteRanks
  std::shared_ptr<EventPool> events_;
  std::unique_ptr<GrowableBuffer> scratch_;
  DetachedCalls ends_;
  StreamTraffic traffic_;
  std::vector<std::unique_ptr<Channel>> channels_;  // at least one; last, as it uses the others
};

}  // namespace pycomm::device
