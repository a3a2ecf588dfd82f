// Calls with NCCL: NCCL's collectives, or plans whose messages are ncclSend and ncclRecv. If NCCL
// connects only the ranks of each host, plans send messages to other hosts through a host group.
#include <algorithm>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "collectives/choose.h"
#include "device/stream_engine.h"
#include "device_group/device_executor.h"
#include "device_group/group_transport.h"
#include "group/check.h"

namespace pycomm::device_group {
namespace {

constexpr size_t kMaxPlans = 256;
// Bytes of an array per channel, below which a further channel is assumed not to pay.
constexpr size_t kBytesPerChannel = size_t{1} << 20;

class NcclExecutor final : public DeviceExecutor {
 public:
  NcclExecutor(std::shared_ptr<group::Group> host, std::shared_ptr<device::Device> device,
               std::shared_ptr<nccl::NcclApi> nccl)
      : host_(std::move(host)),
        device_(std::move(device)),
        nccl_(std::move(nccl)),
        engine_(nccl_, device_, host_->rank(), host_->size()) {}
  // For messages with `peer`. The communicator has rank 0 for the lower of the two ranks.
  NcclExecutor(std::shared_ptr<group::Group> host, std::shared_ptr<device::Device> device,
               std::shared_ptr<nccl::NcclApi> nccl, int peer)
      : host_(std::move(host)),
        device_(std::move(device)),
        nccl_(std::move(nccl)),
        of_two_(true),
        engine_(nccl_, device_, host_->rank() < peer ? 0 : 1, 2) {}

  void connect_two(const nccl::NcclId& id, const Deadline& deadline) {
    engine_.connect({&id, 1}, {}, deadline);
    communicators_ = engine_.communicators();
  }
  void connect(const DeviceOptions& options, std::chrono::nanoseconds timeout);

  Algorithm algorithm_for(const group::Call& call) const override;
  void prepare(Launch& launch) override;
  std::shared_ptr<device::Event> enqueue(const Launch& launch) override;
  // Not if the agreement compares more than the signature.
  bool can_precede_agreement(const group::Call& call) const override {
    return gate_ && (call.operation != Operation::all_to_all || call.counts.empty());
  }
  void agreed() noexcept override { gate_->open(); }
  bool is_connected(const group::Call& message) const override {
    return engine_.is_connected(rank_of(message.peer), message.operation == Operation::send);
  }
  group::Stats stats() const override {
    const device::StreamTraffic& traffic = engine_.traffic();
    return {.frames_sent = traffic.groups,
            .bytes_sent = traffic.bytes_sent,
            .algorithm = engine_.reaches_all() ? Algorithm::nccl : Algorithm::automatic};
  }

  std::optional<Error> async_error(const std::string& what) override;
  void close(const Deadline& deadline) noexcept override { engine_.close(deadline); }
  void abort(const std::string& reason) noexcept override {
    if (gate_) gate_->open_forever();
    engine_.abort(reason);
  }

 private:
  std::vector<int> local_ranks_of(const DeviceOptions& options) const;
  std::vector<nccl::NcclId> create_ids(const DeviceOptions& options,
                                       const std::vector<int>& local_ranks,
                                       std::chrono::nanoseconds timeout);
  void exchange_failures(bool failed, std::chrono::nanoseconds timeout);
  device::StreamJob job_of(const Launch& launch) const;
  std::vector<device::PeerMessage> messages_of(std::span<const group::Call> calls) const {
    return peer_messages(calls, [this](int peer) { return rank_of(peer); });
  }
  // The rank of a message's peer in the engine.
  int rank_of(int peer) const { return of_two_ ? static_cast<int>(host_->rank() < peer) : peer; }
  int channels_of(const group::Call& call) const;
  std::shared_ptr<const std::vector<device::StreamStages>> plan_of(const group::Call& call);

  std::shared_ptr<group::Group> host_;
  std::shared_ptr<device::Device> device_;
  std::shared_ptr<nccl::NcclApi> nccl_;
  const bool of_two_ = false;  // the communicator has two ranks of the group, in their order
  device::StreamEngine engine_;
  std::vector<nccl::Communicator*> communicators_;  // owned by engine_, by channel
  std::map<std::tuple<Operation, Algorithm, size_t, int, int>,
           std::shared_ptr<const std::vector<device::StreamStages>>>
      plans_;
  std::shared_ptr<device::HostGate> gate_;  // null: each call waits for its agreement
};

// If communicators connect only the ranks of one host: by rank, the index among this host's ranks,
// or kNoRank. Otherwise empty.
std::vector<int> NcclExecutor::local_ranks_of(const DeviceOptions& options) const {
  if (options.nccl_between_hosts || host_->info().host_count == 1) return {};
  const std::vector<int>& hosts = host_->info().hosts;
  const int mine = hosts[static_cast<size_t>(host_->rank())];
  std::vector<int> local_ranks;
  int next = 0;
  for (const int host : hosts) local_ranks.push_back(host == mine ? next++ : collectives::kNoRank);
  return local_ranks;
}

// The id of each channel's communicator, created by the lowest rank that shares it.
std::vector<nccl::NcclId> NcclExecutor::create_ids(const DeviceOptions& options,
                                                   const std::vector<int>& local_ranks,
                                                   std::chrono::nanoseconds timeout) {
  const auto first =
      local_ranks.empty()
          ? size_t{0}
          : static_cast<size_t>(std::ranges::find(local_ranks, 0) - local_ranks.begin());
  const auto connected = local_ranks.empty() ? host_->size() : host_->info().local_size;
  const auto channels = static_cast<size_t>(options.channels);
  std::vector<nccl::NcclId> mine(channels), all(channels * static_cast<size_t>(host_->size()));
  if (static_cast<size_t>(host_->rank()) == first && connected > 1)
    for (nccl::NcclId& id : mine) nccl::create_id(*nccl_, id);
  host_->run({.operation = Operation::all_gather,
              .input = mine.data(),
              .output = all.data(),
              .count = channels * sizeof(nccl::NcclId),
              .timeout = timeout});
  const auto named = std::span(all).subspan(first * channels, channels);
  return {named.begin(), named.end()};
}

// A rank that cannot create a communicator fails, and so do the ranks that wait for it and ranks of
// other hosts whose communicators are complete.
void NcclExecutor::connect(const DeviceOptions& options, std::chrono::nanoseconds timeout) {
  const Deadline deadline(timeout);
  device::RemoteRanks remote{.local_ranks = local_ranks_of(options)};
  const auto ids = create_ids(options, remote.local_ranks, timeout);
  for (size_t channel = 0; !remote.local_ranks.empty() && channel < ids.size(); ++channel)
    remote.transports.push_back(std::make_unique<GroupTransport>(host_->split(0, host_->rank())));
  const bool has_remote_ranks = !remote.local_ranks.empty();
  std::optional<Error> failure;
  try {
    engine_.connect(ids, std::move(remote), deadline);
    communicators_ = engine_.communicators();
  } catch (const Error& error) {
    failure =
        error.kind() == ErrorKind::timeout ? error : Unsupported(error.what(), error.fields());
  }
  if (has_remote_ranks) exchange_failures(failure.has_value(), 2 * timeout);
  if (failure) throw Error(*failure);
  if (options.agree_after && engine_.reaches_all() && host_->size() > 1)
    gate_ = std::make_shared<device::HostGate>(device_);
}

// Throws Unsupported if only other ranks failed.
void NcclExecutor::exchange_failures(bool failed, std::chrono::nanoseconds timeout) {
  std::vector<uint8_t> all(static_cast<size_t>(host_->size()));
  const auto mine = static_cast<uint8_t>(failed);
  host_->run({.operation = Operation::all_gather,
              .input = &mine,
              .output = all.data(),
              .count = 1,
              .timeout = timeout});
  const auto found = std::ranges::find(all, uint8_t{1});
  if (failed || found == all.end()) return;
  throw Unsupported(
      "rank " + std::to_string(found - all.begin()) +
      " could not connect to the other ranks of its host with NCCL; see the error of that rank");
}

// NCCL's collective if there is one, as NCCL knows how its GPUs are connected; not for sums in rank
// order.
Algorithm NcclExecutor::algorithm_for(const group::Call& call) const {
  if (!group::is_plan(call.operation))
    return engine_.reaches_all() ? Algorithm::nccl : Algorithm::direct;
  const int size = host_->size();
  if (call.algorithm == Algorithm::nccl && !engine_.reaches_all())
    group::throw_unsupported(
        call,
        "NCCL connects only the ranks of each host here (cuda_internode_transport); omit the "
        "algorithm or choose another");
  const bool own = call.counts.empty() && device::has_nccl(call.operation, call.dtype, call.op);
  if (call.algorithm == Algorithm::nccl && !own)
    group::throw_unsupported(
        call,
        "NCCL does not support this dtype, op or list of counts; omit the algorithm or "
        "choose another");
  if (call.algorithm == Algorithm::host_staged)
    group::throw_unsupported(call, "the algorithm host_staged is for ranks that share a GPU");
  if (call.algorithm == Algorithm::nccl && size == 1) return Algorithm::direct;
  const bool ordered = group::reduces(call.operation) && host_->info().reproducible;
  if (call.algorithm != Algorithm::automatic) return call.algorithm;
  if (size > 1 && !ordered && own && engine_.reaches_all()) return Algorithm::nccl;
  return collectives::choose({.operation = call.operation,
                              .dtype = call.dtype,
                              .op = call.op,
                              .size = size,
                              .count = group::count_to_choose_by(call),
                              .reproducible = host_->info().reproducible,
                              .ragged = !call.counts.empty(),
                              .hosts = host_->info().host_count});
}

// The same on all ranks.
int NcclExecutor::channels_of(const group::Call& call) const {
  if (call.algorithm != Algorithm::ring) return 1;
  const size_t worth = call.count * bytes_of(call.dtype) / kBytesPerChannel;
  return static_cast<int>(std::clamp<size_t>(worth, 1, engine_.channels()));
}

// Null for NCCL's collectives.
std::shared_ptr<const std::vector<device::StreamStages>> NcclExecutor::plan_of(
    const group::Call& call) {
  if (call.algorithm == Algorithm::nccl) return nullptr;
  const collectives::CollectiveShape at{.rank = host_->rank(),
                                        .size = host_->size(),
                                        .count = call.count,
                                        .root = group::is_rooted(call.operation) ? call.peer : 0,
                                        .counts = call.counts,
                                        .hosts = host_->info().hosts};
  const int channels = channels_of(call);
  const auto made = [&] {
    const collectives::Plan plan = collectives::make_plan(call.algorithm, call.operation, at);
    return std::make_shared<const std::vector<device::StreamStages>>(
        device::make_channels(plan, at.rank, channels));
  };
  if (!call.counts.empty()) return made();  // counts change between calls
  const auto key = std::tuple(call.operation, call.algorithm, call.count, at.root, channels);
  if (const auto found = plans_.find(key); found != plans_.end()) return found->second;
  if (plans_.size() >= kMaxPlans) plans_.clear();
  return plans_.emplace(key, made()).first->second;
}

device::StreamJob NcclExecutor::job_of(const Launch& launch) const {
  const group::Call& call = launch.first();
  return {.plan = launch.plan.get(),
          .operation = call.operation,
          .dtype = call.dtype,
          .op = call.op,
          .input = static_cast<const std::byte*>(call.input),
          .output = static_cast<std::byte*>(call.output),
          .count = call.count,
          .peer = call.peer,
          .timeout = call.timeout,
          .gate = launch.before_agreement ? gate_ : nullptr};
}

void NcclExecutor::prepare(Launch& launch) {
  if (launch.has_messages()) return engine_.prepare(messages_of(launch.calls), launch.stream());
  launch.plan = plan_of(launch.first());
  engine_.prepare(job_of(launch), launch.stream());
}

std::shared_ptr<device::Event> NcclExecutor::enqueue(const Launch& launch) {
  if (launch.has_messages())
    return engine_.enqueue(messages_of(launch.calls), launch.first().timeout, *launch.before);
  return engine_.enqueue(job_of(launch), *launch.before);
}

std::optional<Error> NcclExecutor::async_error(const std::string& what) {
  for (nccl::Communicator* const communicator : communicators_) {
    const nccl::NcclResult state = communicator->state();
    if (state != nccl::NcclResult::success && state != nccl::NcclResult::in_progress)
      return communicator->error_of(what, state);
  }
  if (const auto error = engine_.async_error())
    return Error(error->kind(), what + ", between hosts: " + error->what(), error->fields());
  return std::nullopt;
}

}  // namespace

std::unique_ptr<DeviceExecutor> make_nccl_executor(std::shared_ptr<group::Group> host,
                                                   std::shared_ptr<device::Device> device,
                                                   std::shared_ptr<nccl::NcclApi> nccl,
                                                   const DeviceOptions& options,
                                                   std::chrono::nanoseconds timeout) {
  auto executor =
      std::make_unique<NcclExecutor>(std::move(host), std::move(device), std::move(nccl));
  executor->connect(options, timeout);
  return executor;
}

std::unique_ptr<DeviceExecutor> make_nccl_executor_of_two(std::shared_ptr<group::Group> host,
                                                          std::shared_ptr<device::Device> device,
                                                          std::shared_ptr<nccl::NcclApi> nccl,
                                                          const NcclPeer& peer,
                                                          const Deadline& deadline) {
  auto executor = std::make_unique<NcclExecutor>(std::move(host), std::move(device),
                                                 std::move(nccl), peer.peer);
  executor->connect_two(peer.id, deadline);
  return executor;
}

}  // namespace pycomm::device_group
