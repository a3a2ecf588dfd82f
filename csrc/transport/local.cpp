#include "transport/local.h"

#include <sys/socket.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <set>
#include <tuple>
#include <utility>

#include "core/errors.h"
#include "os/socket.h"
#include "transport/ring_channel.h"

namespace pycomm {
namespace {

std::shared_ptr<RingMemory> make_ring(size_t bytes) {
  const Fd memory = make_shared_memory(RingMemory::file_bytes(bytes));
  return std::make_shared<RingMemory>(memory.get(), bytes);
}

struct Pair {
  std::unique_ptr<Channel> mine, theirs;
};

Pair make_pair(size_t ring_bytes) {
  int bells[2];
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, bells) != 0)
    throw_errno("making a pair of sockets");
  Fd mine(bells[0]), theirs(bells[1]);
  auto in = make_ring(ring_bytes), out = make_ring(ring_bytes);
  return {std::make_unique<RingChannel>("local", in, out, std::move(mine)),
          std::make_unique<RingChannel>("local", out, in, std::move(theirs))};
}

}  // namespace

std::unique_ptr<Channel> local_channel(const std::string& meeting, int rank, int peer,
                                       size_t ring_bytes) {
  using Key = std::tuple<std::string, int, int>;
  struct Waiting {
    int rank;
    std::unique_ptr<Channel> channel;
  };
  static std::mutex mutex;
  static std::map<Key, Waiting> waiting;  // ends whose rank has not come yet

  const std::lock_guard lock(mutex);
  const Key key{meeting, std::min(rank, peer), std::max(rank, peer)};
  if (const auto found = waiting.find(key); found != waiting.end()) {
    check(found->second.rank == rank, "a rank came twice to a local meeting");
    auto channel = std::move(found->second.channel);
    waiting.erase(found);
    return channel;
  }
  Pair pair = make_pair(ring_bytes);
  waiting.emplace(key, Waiting{peer, std::move(pair.theirs)});
  return std::move(pair.mine);
}

// What the doors of one meeting share, while one of them is open.
struct LocalDoor::Meeting {
  std::mutex mutex;                                             // guards the rest
  std::map<int, LocalDoor*> doors;                              // open now
  std::set<int> closed;                                         // ranks
  std::set<std::pair<int, int>> met;                            // lower, higher
  std::map<int, std::map<int, std::unique_ptr<Channel>>> kept;  // ends: for whom, from whom
};

LocalDoor::LocalDoor(const std::string& meeting, int rank, size_t ring_bytes, Arrived arrived)
    : rank_(rank), ring_bytes_(ring_bytes), arrived_(std::move(arrived)) {
  static std::mutex mutex;
  static std::map<std::string, std::weak_ptr<Meeting>> meetings;
  {
    const std::lock_guard lock(mutex);
    std::erase_if(meetings, [](const auto& entry) { return entry.second.expired(); });
    meeting_ = meetings[meeting].lock();
    if (!meeting_) meetings[meeting] = meeting_ = std::make_shared<Meeting>();
  }
  const std::lock_guard lock(meeting_->mutex);
  check(meeting_->doors.emplace(rank, this).second, "a rank came twice to a local meeting");
  for (auto& [peer, channel] : meeting_->kept[rank]) arrived_(peer, std::move(channel));
  meeting_->kept.erase(rank);
}

LocalDoor::~LocalDoor() {
  const std::lock_guard lock(meeting_->mutex);
  meeting_->doors.erase(rank_);
  meeting_->closed.insert(rank_);
}

bool LocalDoor::call(int peer) {
  const std::lock_guard lock(meeting_->mutex);
  if (meeting_->met.contains(std::minmax(rank_, peer))) return true;
  if (meeting_->closed.contains(peer)) return false;
  Pair pair = make_pair(ring_bytes_);
  meeting_->met.insert(std::minmax(rank_, peer));
  arrived_(peer, std::move(pair.mine));
  if (const auto door = meeting_->doors.find(peer); door != meeting_->doors.end())
    door->second->arrived_(rank_, std::move(pair.theirs));
  else
    meeting_->kept[peer][rank_] = std::move(pair.theirs);
  return true;
}

std::shared_ptr<std::byte> local_memory(const std::string& meeting, int rank, size_t bytes) {
  static std::mutex mutex;
  static std::map<std::pair<std::string, int>, std::weak_ptr<std::byte>> known;

  const std::lock_guard lock(mutex);
  std::erase_if(known, [](const auto& entry) { return entry.second.expired(); });
  std::weak_ptr<std::byte>& found = known[{meeting, rank}];
  auto memory = found.lock();
  if (!memory) found = memory = map_shared_memory(make_shared_memory(bytes).get(), bytes);
  return memory;
}

}  // namespace pycomm
