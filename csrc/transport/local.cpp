#include "transport/local.h"

#include <sys/socket.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <tuple>

#include "core/errors.h"
#include "os/socket.h"
#include "transport/ring_channel.h"

namespace pycomm {
namespace {

std::shared_ptr<RingMemory> make_ring(size_t bytes) {
  const Fd memory = make_shared_memory(RingMemory::file_bytes(bytes));
  return std::make_shared<RingMemory>(memory.get(), bytes);
}

}  // namespace

std::unique_ptr<Channel> local_channel(const std::string& meeting, int rank, int peer,
                                       size_t ring_bytes) {
  using Pair = std::tuple<std::string, int, int>;
  struct Waiting {
    int rank;
    std::unique_ptr<Channel> channel;
  };
  static std::mutex mutex;
  static std::map<Pair, Waiting> waiting;  // ends whose rank has not come yet

  const std::lock_guard lock(mutex);
  const Pair pair{meeting, std::min(rank, peer), std::max(rank, peer)};
  if (const auto found = waiting.find(pair); found != waiting.end()) {
    check(found->second.rank == rank, "a rank came twice to a local meeting");
    auto channel = std::move(found->second.channel);
    waiting.erase(found);
    return channel;
  }
  int bells[2];
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, bells) != 0)
    throw_errno("making a pair of sockets");
  Fd mine(bells[0]), theirs(bells[1]);
  auto in = make_ring(ring_bytes), out = make_ring(ring_bytes);
  waiting.emplace(
      pair, Waiting{peer, std::make_unique<RingChannel>("local", out, in, std::move(theirs))});
  return std::make_unique<RingChannel>("local", in, out, std::move(mine));
}

}  // namespace pycomm
