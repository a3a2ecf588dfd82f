// Which of the connections that have not proved themselves is closed when one more comes.
//
// A hostile client must not be able to keep a rank out that needs one round trip between its
// greeting and its proof. So the choice is random, as sshd's MaxStartups is, among the connections
// of the source address that holds most of them if that is more than its share, and among those
// that have not sent a greeting before the others. With n places and r new connections a second a
// rank at a round trip of t seconds gets in with a probability of exp(-r t / n) at each attempt, or
// at once where the hostile clients have few addresses. Called by the listeners of a group and of
// the store.
#pragma once

#include <cstddef>
#include <cstdint>
#include <random>
#include <span>

namespace pycomm {

struct Pending {
  uint64_t source = 0;   // source_of() the connection
  bool greeted = false;  // Handshake::greeted()
};

// So many unproven connections are held at once: a quarter of the descriptors that this process may
// open, but 64 at least and 1,024 at most.
size_t max_pending();

// The address that a connection comes from, without its port: the host of IPv4, the network of 64
// bits of IPv6, the user of a Unix socket.
uint64_t source_of(int fd);

// The index of the one to close; `pending` is not empty.
size_t choose_evicted(std::span<const Pending> pending, std::minstd_rand& random);

// Seeded by the system: a client cannot foresee the choice.
std::minstd_rand eviction_random();

}  // namespace pycomm
