// Stream sockets, TCP and abstract Unix, as far as setting up a connection goes: everything that is
// opened here is non-blocking and close-on-exec, and begins without BBR (see below). Not here:
// sending, receiving, and who is at the other end (transport/handshake.h). Called by the stores,
// the transports and the forming of a group.
#pragma once

#include <sys/socket.h>

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "core/errors.h"
#include "os/fd.h"

namespace pycomm {

struct Address {
  sockaddr_storage storage{};
  socklen_t length = 0;
  std::string text() const;  // "127.0.0.1:14758", "[::1]:14758", "@name"
  std::string host() const;  // without the port: "127.0.0.1", "::1", "fe80::1%eth0"
  uint16_t port() const;     // 0 for a Unix address
  Address with_port(uint16_t port) const;
  bool is_loopback() const;
  bool is_link_local() const;  // means something on one network alone, and not to other hosts
};

// `host` is an IPv4 or IPv6 literal or a name, which is looked up (that may block); those of IPv4
// come first where a name has both. A link-local one must say its interface, as fe80::1%eth0. Never
// empty; throws InvalidArgument.
std::vector<Address> tcp_addresses(const std::string& host, uint16_t port);

// The first of them. An empty host is every interface, to listen on: of both IPv6 and IPv4 where
// this host has both.
Address tcp_address(const std::string& host, uint16_t port);

// What Address::text() made of a TCP address; nothing is looked up. Throws InvalidArgument.
Address parse_tcp_address(const std::string& text);

// A name that lives in this machine's network namespace and in no file; at most 107 bytes.
Address abstract_unix_address(const std::string& name);

// As many as Linux lets wait by default, but for three: so `ss -l` tells our listeners from
// others', and the unauthenticated clients of the tests find them (tests/attack.py).
inline constexpr int kBacklog = 4093;

// Throws InvalidArgument when the address is taken or is not of this machine. Port 0: see
// local_address().
Fd listen_on(const Address& address, int backlog = kBacklog);

Address local_address(int fd);

// The system's policy lets this process connect to nobody at that address (EACCES, EPERM).
class Forbidden : public PeerLost {
 public:
  using PeerLost::PeerLost;
};

// Begins to connect; the socket is writable, or in error, when that is over, and connect_error()
// then says how. Throws PeerLost when the connection cannot even be begun (no route, no local port
// left), and Forbidden. `from` is the address of this host to connect from; null: the route's.
Fd start_connect(const Address& address, const Address* from = nullptr);

// The address of this host from which a packet to that one would leave. Sends nothing. False where
// no route leads there.
bool source_towards(const Address& address, Address& source);

// 0: connected. EINPROGRESS: not yet. Otherwise why not; a refused connection is ECONNREFUSED. The
// kernel tells a reason once: do not ask again after one.
int connect_error(int fd);

// BBR, where it is the system's choice, for a connection that was begun without. It spaces packets
// out by timers, and once it was chosen they stay for as long as the connection lives, whatever is
// chosen later: between two namespaces 4 KiB took up to 2 ms then, and 12 us without.
void pace_if_usual(int fd);

// Whether the process at the other end of a Unix socket had this process's user id when it
// connected or began to listen. `user` becomes its id.
bool is_our_user(int fd, uint32_t& user);

// Keepalive probes after a minute without data, for a TCP connection that may be idle for hours: a
// firewall or a load balancer forgets an idle flow after some minutes. A peer whose host does not
// answer ends the connection after two minutes. Does nothing for a Unix socket.
void keep_alive(int fd);

// The next waiting connection, or an empty Fd when none is waiting. When this process or this
// machine has no descriptor (or memory) left, the Fd is empty too, `*exhausted` becomes true and
// the connection keeps waiting, so that the listener stays readable: close something, or leave the
// listener out of the next polls for a while, or the loop spins.
Fd accept_from(int fd, bool* exhausted = nullptr);

// poll() on one descriptor: the events that came, 0 when the limit passed first.
short poll_one(int fd, short events, std::chrono::nanoseconds limit);

// InternalError: "<doing> failed: <what errno says> (errno N)".
[[noreturn]] void throw_errno(const std::string& doing);

}  // namespace pycomm
