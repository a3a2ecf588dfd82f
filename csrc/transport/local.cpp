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

namespace pycomm {
namespace {

std::shared_ptr<RingMemory> make_ring(size_t bytes) {
  const Fd memory = make_shared_memory(RingMemory::file_bytes(bytes));
  return std::make_shared<RingMemory>(memory.get(), bytes);
}

using Key = std::tuple<std::string, int, int>;  // the meeting, the lower rank, the higher

struct End {
  int rank;
  std::string agreed;  // as the rank that came first gave it
  std::unique_ptr<Channel> channel;
};

// Ends whose rank has not come yet, each for as long as the rank that came first holds its own.
// Of the latest of those that left alone a mark stays: whoever comes after them does not wait.
struct Waiting {
  using Ends = std::map<Key, End>;

  std::mutex mutex;  // guards the rest
  Ends ends;
  std::array<Ends::node_type, 1024> left;
  size_t next = 0;  // of left, to be written over
};

// Never destroyed: a channel may end later than everything else.
Waiting& waiting() {
  static auto* const one = new Waiting;
  return *one;
}

// Of the rank that comes first, as long as its end lives: with it goes the one that nobody took.
struct Seat {
  const Key key;
  std::shared_ptr<RingMemory> in;  // which the end reads; null where the seat is not used

  explicit Seat(Key of) : key(std::move(of)) {}
  Seat(const Seat&) = delete;
  Seat& operator=(const Seat&) = delete;
  ~Seat() {
    std::unique_ptr<Channel> end;  // closed when the lock is free
    Waiting& all = waiting();
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

Pair make_pair(size_t ring_bytes, const std::shared_ptr<Seat>& seat = nullptr) {
  int bells[2];
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, bells) != 0)
    throw_errno("making a pair of sockets");
  Fd mine(bells[0]), theirs(bells[1]);
  auto in = make_ring(ring_bytes), out = make_ring(ring_bytes), held = in;
  if (seat) {
    seat->in = in;
    held = {seat, in.get()};
  }
  return {std::make_unique<RingChannel>("local", std::move(held), out, std::move(mine)),
          std::make_unique<RingChannel>("local", out, in, std::move(theirs))};
}

}  // namespace

std::unique_ptr<Channel> local_channel(const std::string& meeting, int rank, int peer,
                                       size_t ring_bytes, std::string* agreed) {
  const Key key{meeting, std::min(rank, peer), std::max(rank, peer)};
  const auto seat = std::make_shared<Seat>(key);
  Pair pair;  // as the seat, goes when the lock is free
  Waiting& all = waiting();
  const std::lock_guard lock(all.mutex);
  if (const auto found = all.ends.find(key); found != all.ends.end()) {
    check(found->second.rank == rank, "a rank came twice to a local meeting");
    auto channel = std::move(found->second.channel);
    if (agreed != nullptr) *agreed = std::move(found->second.agreed);
    all.ends.erase(found);
    return channel;
  }
  pair = make_pair(ring_bytes, seat);
  const auto left = std::ranges::find_if(
      all.left, [&](const auto& mark) { return !mark.empty() && mark.key() == key; });
  if (left == all.left.end())
    all.ends.emplace(key, End{peer, agreed != nullptr ? *agreed : "", std::move(pair.theirs)});
  else
    *left = {};
  return std::move(pair.mine);
}

// What the doors of one meeting share, while one of them is open.
struct LocalDoor::Meeting {
  std::string agreed;                                           // as its first rank gave it
  std::mutex mutex;                                             // guards the rest
  std::map<int, LocalDoor*> doors;                              // open now
  std::set<int> closed;                                         // ranks
  std::set<std::pair<int, int>> met;                            // lower, higher
  std::map<int, std::map<int, std::unique_ptr<Channel>>> kept;  // ends: for whom, from whom
};

LocalDoor::LocalDoor(const LocalMeeting& of, int rank, size_t ring_bytes, Arrived arrived)
    : rank_(rank), ring_bytes_(ring_bytes), arrived_(std::move(arrived)) {
  static std::mutex mutex;
  static std::map<std::string, std::weak_ptr<Meeting>> meetings;
  {
    const std::lock_guard lock(mutex);
    std::erase_if(meetings, [](const auto& entry) { return entry.second.expired(); });
    meeting_ = meetings[of.name].lock();
    if (!meeting_) {
      meetings[of.name] = meeting_ = std::make_shared<Meeting>();
      meeting_->agreed = of.agreed;
    }
  }
  const std::lock_guard lock(meeting_->mutex);
  if (meeting_->agreed != of.agreed) {
    meeting_->closed.insert(rank);
    throw Mismatch("the ranks of this process were given different notes of the group's ranks");
  }
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
