#include "transport/local.h"

#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <map>
#include <mutex>
#include <set>
#include <tuple>
#include <utility>

#include "core/errors.h"
#include "os/socket.h"
#include "transport/ring_channel.h"

namespace pycomm::transport {
namespace {

std::shared_ptr<os::RingMemory> make_ring(size_t bytes) {
  const os::Fd memory = os::make_shared_memory(os::RingMemory::file_bytes(bytes));
  return std::make_shared<os::RingMemory>(memory.get(), bytes);
}

using Key = std::tuple<std::string, int, int>;  // the group, the lower rank, the higher

struct End {
  int rank;
  std::string agreed;  // of the first rank
  std::unique_ptr<Channel> channel;
};

// Ends whose rank has not called yet, each kept while the first rank holds its own end. For the
// most recent ends that were dropped, `left` keeps a mark, so that their rank does not wait.
struct PendingEndpoints {
  using Ends = std::map<Key, End>;

  std::mutex mutex;  // guards the rest
  Ends ends;
  std::array<Ends::node_type, 1024> left;
  size_t next = 0;  // the index in `left` to overwrite
};

// Never destroyed: a channel may outlive static objects.
PendingEndpoints& pending_endpoints() {
  static auto* const one = new PendingEndpoints;
  return *one;
}

// Lives as long as the end of the first rank; its destructor drops the other end if unused.
struct PendingEndpoint {
  const Key key;
  std::shared_ptr<os::RingMemory> in;  // the ring that the end reads; null: not used

  explicit PendingEndpoint(Key of) : key(std::move(of)) {}
  PendingEndpoint(const PendingEndpoint&) = delete;
  PendingEndpoint& operator=(const PendingEndpoint&) = delete;
  ~PendingEndpoint() {
    std::unique_ptr<Channel> end;  // destroyed after the lock is released
    PendingEndpoints& all = pending_endpoints();
    const std::lock_guard lock(all.mutex);
    const auto found = all.ends.find(key);
    if (!in || found == all.ends.end()) return;
    end = std::move(found->second.channel);
    all.left[all.next++ % all.left.size()] = all.ends.extract(found);
  }
};

struct Pair {
  std::unique_ptr<Channel> mine, theirs;
};

Pair make_pair(size_t ring_bytes, const std::shared_ptr<PendingEndpoint>& endpoint = nullptr) {
  int wakeup_sockets[2];
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, wakeup_sockets) != 0)
    os::throw_errno("making a pair of sockets");
  os::Fd mine(wakeup_sockets[0]), theirs(wakeup_sockets[1]);
  auto in = make_ring(ring_bytes), out = make_ring(ring_bytes), held = in;
  if (endpoint) {
    endpoint->in = in;
    held = {endpoint, in.get()};
  }
  return {std::make_unique<RingChannel>("local", std::move(held), out, std::move(mine)),
          std::make_unique<RingChannel>("local", out, in, std::move(theirs))};
}

}  // namespace

std::unique_ptr<Channel> local_channel(const std::string& group, int rank, int peer,
                                       size_t ring_bytes, std::string* agreed) {
  const Key key{group, std::min(rank, peer), std::max(rank, peer)};
  const auto endpoint = std::make_shared<PendingEndpoint>(key);
  Pair pair;  // like the endpoint, freed without the lock
  PendingEndpoints& all = pending_endpoints();
  const std::lock_guard lock(all.mutex);
  if (const auto found = all.ends.find(key); found != all.ends.end()) {
    check(found->second.rank == rank, "a rank opened its end of a local channel twice");
    auto channel = std::move(found->second.channel);
    if (agreed != nullptr) *agreed = std::move(found->second.agreed);
    all.ends.erase(found);
    return channel;
  }
  pair = make_pair(ring_bytes, endpoint);
  const auto left = std::ranges::find_if(
      all.left, [&](const auto& mark) { return !mark.empty() && mark.key() == key; });
  if (left == all.left.end())
    all.ends.emplace(key, End{peer, agreed != nullptr ? *agreed : "", std::move(pair.theirs)});
  else
    *left = {};
  return std::move(pair.mine);
}

// Shared by the listeners of one group while one of them exists.
struct InProcessListener::Registry {
  std::string agreed;                                              // of its first rank
  std::mutex mutex;                                                // guards the rest
  std::map<int, InProcessListener*> listeners;                     // open now
  std::set<int> closed;                                            // ranks
  std::set<std::pair<int, int>> met;                               // lower, higher
  std::map<int, std::map<int, std::unique_ptr<Channel>>> pending;  // ends: for whom, from whom
};

InProcessListener::InProcessListener(const InProcessGroup& of, int rank, size_t ring_bytes,
                                     OnConnected on_connected)
    : rank_(rank), ring_bytes_(ring_bytes), on_connected_(std::move(on_connected)) {
  static std::mutex mutex;
  static std::map<std::string, std::weak_ptr<Registry>> registries;
  {
    const std::lock_guard lock(mutex);
    std::erase_if(registries, [](const auto& entry) { return entry.second.expired(); });
    registry_ = registries[of.name].lock();
    if (!registry_) {
      registries[of.name] = registry_ = std::make_shared<Registry>();
      registry_->agreed = of.agreed;
    }
  }
  const std::lock_guard lock(registry_->mutex);
  if (registry_->agreed != of.agreed) {
    registry_->closed.insert(rank);
    throw Mismatch("the ranks of this process read different rank infos from the store");
  }
  check(registry_->listeners.emplace(rank, this).second, "a rank listens twice in a local group");
  for (auto& [peer, channel] : registry_->pending[rank]) on_connected_(peer, std::move(channel));
  registry_->pending.erase(rank);
}

InProcessListener::~InProcessListener() {
  const std::lock_guard lock(registry_->mutex);
  registry_->listeners.erase(rank_);
  registry_->closed.insert(rank_);
}

bool InProcessListener::connect(int peer) {
  const std::lock_guard lock(registry_->mutex);
  if (registry_->met.contains(std::minmax(rank_, peer))) return true;
  if (registry_->closed.contains(peer)) return false;
  Pair pair = make_pair(ring_bytes_);
  registry_->met.insert(std::minmax(rank_, peer));
  on_connected_(peer, std::move(pair.mine));
  if (const auto listener = registry_->listeners.find(peer); listener != registry_->listeners.end())
    listener->second->on_connected_(rank_, std::move(pair.theirs));
  else
    registry_->pending[peer][rank_] = std::move(pair.theirs);
  return true;
}

std::shared_ptr<std::byte> local_memory(const std::string& group, int rank, size_t bytes) {
  static std::mutex mutex;
  static std::map<std::pair<std::string, int>, std::weak_ptr<std::byte>> known;

  const std::lock_guard lock(mutex);
  std::erase_if(known, [](const auto& entry) { return entry.second.expired(); });
  std::weak_ptr<std::byte>& found = known[{group, rank}];
  auto memory = found.lock();
  if (!memory) found = memory = os::map_shared_memory(os::make_shared_memory(bytes).get(), bytes);
  return memory;
}

}  // namespace pycomm::transport
