// See admission.h.
#include "transport/admission.h"

#include <netinet/in.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "os/random.h"

namespace pycomm::transport {
namespace {

constexpr size_t kLeast = 64, kMost = 1024;
// The share of one source is an eighth of the connections.
constexpr size_t kShares = 8;

// Finds the source with most connections. True if it exceeds its share.
bool find_largest(std::span<const Pending> pending, uint64_t& largest) {
  std::vector<uint64_t> sources;
  for (const Pending& one : pending) sources.push_back(one.source);
  std::ranges::sort(sources);
  size_t most = 0;
  for (size_t begin = 0, end = 0; begin < sources.size(); begin = end) {
    while (end < sources.size() && sources[end] == sources[begin]) ++end;
    if (end - begin <= most) continue;
    most = end - begin;
    largest = sources[begin];
  }
  return most > std::max<size_t>(pending.size() / kShares, 1);
}

}  // namespace

size_t max_pending() {
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) return kLeast;
  return static_cast<size_t>(std::clamp<rlim_t>(limit.rlim_cur / 4, kLeast, kMost));
}

uint64_t source_of(int fd) {
  sockaddr_storage peer{};
  socklen_t length = sizeof peer;
  if (::getpeername(fd, reinterpret_cast<sockaddr*>(&peer), &length) != 0) return 0;
  if (peer.ss_family == AF_INET) return reinterpret_cast<const sockaddr_in&>(peer).sin_addr.s_addr;
  uint64_t source = 0;
  if (peer.ss_family == AF_INET6) {
    const in6_addr& address = reinterpret_cast<const sockaddr_in6&>(peer).sin6_addr;
    if (!IN6_IS_ADDR_V4MAPPED(&address)) {
      std::memcpy(&source, &address, sizeof source);
      return source;
    }
    uint32_t ipv4 = 0;
    std::memcpy(&ipv4, reinterpret_cast<const char*>(&address) + 12, sizeof ipv4);
    return ipv4;
  }
  ucred user{};
  socklen_t bytes = sizeof user;
  if (::getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &user, &bytes) == 0) source = user.uid;
  return source;
}

size_t choose_evicted(std::span<const Pending> pending, std::minstd_rand& random) {
  uint64_t largest = 0;
  const bool crowd = find_largest(pending, largest);
  std::vector<size_t> silent, greeted;
  for (size_t i = 0; i < pending.size(); ++i)
    if (!crowd || pending[i].source == largest)
      (pending[i].greeted ? greeted : silent).push_back(i);
  const auto& some = silent.empty() ? greeted : silent;
  return some[std::uniform_int_distribution<size_t>(0, some.size() - 1)(random)];
}

std::minstd_rand eviction_random() {
  uint32_t seed = 0;
  const auto bytes = os::random_bytes();
  std::memcpy(&seed, bytes.data(), sizeof seed);
  return std::minstd_rand(seed);
}

}  // namespace pycomm::transport
