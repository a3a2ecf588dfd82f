// Chooses which pending (unauthenticated) connection is closed when a new one exceeds the limit.
//
// A hostile client must not be able to lock out a rank, which needs one round trip between its
// greeting and its proof. So the choice is random, as in sshd's MaxStartups. If the source address
// with most connections exceeds its share, only its connections are candidates. Connections without
// a greeting are chosen before the others. With n places and r new connections per second, a rank
// with a round-trip time of t seconds succeeds with a probability of exp(-r t / n) at each attempt,
// and at once if the hostile clients have few addresses.
#pragma once

#include <cstddef>
#include <cstdint>
#include <list>
#include <optional>
#include <random>
#include <span>
#include <vector>

namespace pycomm::transport {

struct Pending {
  uint64_t source = 0;   // source_of() the connection
  bool greeted = false;  // Handshake::greeted()
};

// The maximum number of pending connections: a quarter of the descriptors that this process may
// open, but at least 64 and at most 1,024.
size_t max_pending();

// The source of a connection without its port: the IPv4 address, the first 64 bits of an IPv6
// address, or the user of a Unix socket.
uint64_t source_of(int fd);

// The index of the connection to close; `pending` must not be empty.
size_t choose_evicted(std::span<const Pending> pending, std::minstd_rand& random);

// Seeded by the system, so that a client cannot predict the choice.
std::minstd_rand eviction_random();

// Limits the pending connections of one owner, on one thread.
class Admission {
 public:
  bool is_full(size_t pending) const { return pending >= max_pending_; }

  // Erases the pending connection that choose_evicted() selects; false if there is none.
  // `describe(connection)`: a Pending, or nullopt after the handshake.
  template <typename Connection, typename Describe>
  bool evict(std::list<Connection>& connections, Describe describe) {
    std::vector<Pending> pending;
    std::vector<typename std::list<Connection>::const_iterator> places;
    for (auto at = connections.cbegin(); at != connections.cend(); ++at) {
      const std::optional<Pending> one = describe(*at);
      if (!one) continue;
      pending.push_back(*one);
      places.push_back(at);
    }
    if (pending.empty()) return false;
    connections.erase(places[choose_evicted(pending, random_)]);
    return true;
  }

 private:
  size_t max_pending_ = max_pending();
  std::minstd_rand random_ = eviction_random();
};

}  // namespace pycomm::transport
