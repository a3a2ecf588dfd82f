#include "device_group/executors.h"

#include <algorithm>
#include <array>
#include <set>
#include <span>
#include <tuple>
#include <utility>
#include <vector>

#include "core/sha256.h"

namespace pycomm::device_group {
namespace {

constexpr const char* kAllRanks =
    "the first collective call with device arrays needs all ranks of the group, each with an array "
    "on its device: ";

// What a rank publishes of its DeviceResources.
struct DeviceInfo {
  std::array<char, 26> bus_id;  // padded with zeros
  bool nccl_shares, has_nccl, nccl_between_hosts, agree_after;
  uint8_t channels;
  std::array<uint8_t, 8> nccl_host;  // a hash of the id; zeros: NCCL knows the host itself
};
static_assert(sizeof(DeviceInfo) == 39);

DeviceInfo device_info_of(const DeviceResources& resources) {
  const auto [channels, nccl_between_hosts, agree_after] = resources.options;
  check(channels >= 1 && channels <= 255, "invalid cuda_channels: it must be between 1 and 255");
  DeviceInfo mine{{},
                  resources.nccl_shares,
                  resources.nccl != nullptr,
                  nccl_between_hosts,
                  agree_after,
                  static_cast<uint8_t>(channels),
                  {}};
  if (const std::string& id = resources.nccl_host_id; !id.empty())
    std::copy_n(sha256(id).begin(), mine.nccl_host.size(), mine.nccl_host.begin());
  const std::string bus_id = resources.device->bus_id();
  std::copy_n(bus_id.begin(), std::min(bus_id.size(), mine.bus_id.size()), mine.bus_id.begin());
  return mine;
}

// By rank.
std::vector<DeviceInfo> exchange_device_info(group::Group& host, const DeviceResources& resources,
                                             std::chrono::nanoseconds limit) {
  const DeviceInfo mine = device_info_of(resources);
  std::vector<DeviceInfo> all(static_cast<size_t>(host.size()));
  try {
    host.run({.operation = Operation::all_gather,
              .input = &mine,
              .output = all.data(),
              .count = sizeof(DeviceInfo),
              .timeout = limit});
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::timeout) throw;
    throw Timeout(kAllRanks + std::string(error.what()), error.fields());
  }
  return all;
}

// The device of a rank as NCCL compares devices: ranks of a host with different ids have different
// ones.
auto device_of(const group::Group& host, int rank, const DeviceInfo& info) {
  return std::tuple(host.info().hosts[static_cast<size_t>(rank)], info.nccl_host, info.bus_id);
}

// Whether the group stages calls in host memory: NCCL refuses two ranks on one device of a host.
bool is_host_staged(const group::Group& host, const std::vector<DeviceInfo>& all) {
  std::set<decltype(device_of(host, 0, all[0]))> devices;
  for (size_t rank = 0; rank < all.size(); ++rank)
    devices.insert(device_of(host, static_cast<int>(rank), all[rank]));
  return devices.size() < all.size() && !std::ranges::all_of(all, &DeviceInfo::nccl_shares);
}

// Throws Unsupported on all ranks if NCCL would send unencrypted data although encrypt=True.
void check_encrypted(const group::Group& host, const DeviceInfo& first) {
  if (host.info().encrypted && host.info().host_count > 1 && first.nccl_between_hosts)
    throw Unsupported(
        "encrypt=True: NCCL between hosts does not encrypt; use cuda_internode_transport=\"tcp\" "
        "for arrays on CUDA devices");
}

// Throws Unsupported if a rank needs NCCL and has none. If NCCL is used inside hosts only, a rank
// that is alone on its host does not need it.
void check_nccl(const group::Group& host, const std::vector<DeviceInfo>& all,
                const DeviceResources& resources) {
  const auto needs = [&](size_t rank) {
    return all[0].nccl_between_hosts ||
           std::ranges::count(host.info().hosts, host.info().hosts[rank]) > 1;
  };
  for (size_t rank = 0; rank < all.size(); ++rank) {
    if (all[rank].has_nccl || !needs(rank)) continue;
    if (!resources.nccl) throw Unsupported(resources.why_no_nccl);
    throw Unsupported("rank " + std::to_string(rank) +
                      " could not load NCCL, which calls on CUDA arrays require; see the error of "
                      "that rank for the places it searched");
  }
}

// What the two ranks of a message tell each other. `id` is that of the lower rank.
struct PairInfo {
  DeviceInfo device;
  nccl::NcclId id;
};

// Whether NCCL may connect two ranks. `lower`: of the lower rank, whose options apply.
bool can_connect(const group::Group& host, int peer, const PairInfo& lower,
                 const PairInfo& higher) {
  if (!lower.device.has_nccl || !higher.device.has_nccl) return false;
  const std::vector<int>& hosts = host.info().hosts;
  const int mine = hosts[static_cast<size_t>(host.rank())];
  if (mine != hosts[static_cast<size_t>(peer)])
    return lower.device.nccl_between_hosts && !host.info().encrypted;
  return device_of(host, peer, lower.device) != device_of(host, peer, higher.device) ||
         (lower.device.nccl_shares && higher.device.nccl_shares);
}

}  // namespace

DeviceExecutor* Executors::of(int peer) const {
  const std::lock_guard lock(mutex_);
  const auto found = executors_.find(peer);
  return found == executors_.end() ? nullptr : found->second.get();
}

// The worker may receive a message meanwhile, for which the ranks must be connected or not.
void Executors::form(std::chrono::nanoseconds limit) {
  if (of_all() != nullptr) return;
  const auto make = [&] {
    if (of_all() == nullptr) keep(kAllPeers, make_of_all(limit));
  };
  host_->run_together(make, limit);
}

std::unique_ptr<DeviceExecutor> Executors::make_of_all(std::chrono::nanoseconds limit) {
  const auto infos = exchange_device_info(*host_, resources_, limit);
  if (is_host_staged(*host_, infos)) return make_host_staged_executor(host_, resources_.device);
  check_encrypted(*host_, infos[0]);
  check_nccl(*host_, infos, resources_);
  const DeviceOptions options{.channels = infos[0].channels,
                              .nccl_between_hosts = infos[0].nccl_between_hosts,
                              .agree_after = infos[0].agree_after};
  return make_nccl_executor(host_, resources_.device, resources_.nccl, options, timeout_);
}

DeviceExecutor* Executors::existing_for_message(int peer) const {
  DeviceExecutor* const found = of_all();
  return found != nullptr ? found : of(peer);
}

DeviceExecutor& Executors::for_message(int peer, const Deadline& deadline) {
  if (DeviceExecutor* const found = existing_for_message(peer)) return *found;
  if (host_->size() > 2) return keep(peer, make_of_two(peer, deadline));
  form(deadline.left());
  return *of_all();
}

std::vector<std::span<const group::Call>> Executors::concurrent_parts(
    std::span<const group::Call> calls) const {
  const bool connected = std::ranges::all_of(calls, [&](const group::Call& call) {
    const DeviceExecutor* const executor = existing_for_message(call.peer);
    return executor != nullptr && executor->is_connected(call);
  });
  if (connected) return {calls};
  std::vector<std::span<const group::Call>> parts;
  for (size_t begin = 0, end = 0; begin < calls.size(); begin = end) {
    while (end < calls.size() && calls[end].peer == calls[begin].peer &&
           calls[end].operation == calls[begin].operation)
      ++end;
    parts.push_back(calls.subspan(begin, end - begin));
  }
  return parts;
}

std::unique_ptr<DeviceExecutor> Executors::make_of_two(int peer, const Deadline& deadline) {
  PairInfo mine{.device = device_info_of(resources_), .id = {}}, theirs{};
  const bool is_lower = host_->rank() < peer;
  if (resources_.nccl && is_lower) nccl::create_id(*resources_.nccl, mine.id);
  const group::Call base{.count = sizeof(PairInfo),
                         .peer = peer,
                         .tag = group::kInternalTag,
                         .timeout = deadline.left()};
  std::array<group::Call, 2> calls{base, base};
  calls[0].operation = Operation::send;
  calls[0].input = &mine;
  calls[1].operation = Operation::recv;
  calls[1].output = &theirs;
  host_->exchange(calls);
  const auto& [lower, higher] = is_lower ? std::tie(mine, theirs) : std::tie(theirs, mine);
  if (!can_connect(*host_, peer, lower, higher))
    return make_host_staged_executor_of_two(host_->pair_with(peer), resources_.device);
  return make_nccl_executor_of_two(host_, resources_.device, resources_.nccl,
                                   {.peer = peer, .id = lower.id}, deadline);
}

// Throws GroupBroken if the group was aborted meanwhile.
DeviceExecutor& Executors::keep(int peer, std::unique_ptr<DeviceExecutor> made) {
  const std::lock_guard lock(mutex_);
  if (aborted_) {
    made->abort(*aborted_);
    throw GroupBroken("the group was aborted: " + *aborted_, {.rank = host_->rank()});
  }
  return *(executors_[peer] = std::move(made));
}

std::vector<DeviceExecutor*> Executors::all() const {
  const std::lock_guard lock(mutex_);
  std::vector<DeviceExecutor*> executors;
  for (const auto& [peer, executor] : executors_) executors.push_back(executor.get());
  return executors;
}

group::Stats Executors::stats() const {
  group::Stats sum;
  if (const DeviceExecutor* const executor = of_all()) sum.algorithm = executor->stats().algorithm;
  for (const DeviceExecutor* const executor : all()) {
    const group::Stats stats = executor->stats();
    sum.frames_sent += stats.frames_sent;
    sum.bytes_sent += stats.bytes_sent;
  }
  return sum;
}

std::optional<Error> Executors::async_error(const std::string& what) const {
  for (DeviceExecutor* const executor : all())
    if (auto error = executor->async_error(what)) return error;
  return std::nullopt;
}

void Executors::close(const Deadline& deadline) noexcept {
  for (DeviceExecutor* const executor : all()) executor->close(deadline);
}

void Executors::abort(const std::string& reason) noexcept {
  {
    const std::lock_guard lock(mutex_);
    aborted_ = reason;
  }
  for (DeviceExecutor* const executor : all()) executor->abort(reason);
}

}  // namespace pycomm::device_group
