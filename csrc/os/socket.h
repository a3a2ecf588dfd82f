// Opens connections: TCP and abstract Unix stream sockets. Every socket is non-blocking and
// close-on-exec, and starts without BBR (see pace_if_usual()). The other end is not authenticated;
// see transport/handshake.h.
#pragma once

#include <sys/socket.h>

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "core/errors.h"
#include "os/fd.h"

namespace pycomm::os {

struct Address {
  sockaddr_storage storage{};
  socklen_t length = 0;
  std::string text() const;  // "127.0.0.1:14758", "[::1]:14758", "@name"
  std::string host() const;  // without the port: "127.0.0.1", "::1", "fe80::1%eth0"
  uint16_t port() const;     // 0 for a Unix address
  Address with_port(uint16_t port) const;
  bool is_loopback() const;
  bool is_link_local() const;  // valid only within one network segment
};

// `host` is an IPv4 or IPv6 literal, or a name, whose look-up may block. IPv4 addresses precede
// IPv6 addresses. A link-local address must include its interface, as fe80::1%eth0. Never empty;
// throws InvalidArgument.
std::vector<Address> tcp_addresses(const std::string& host, uint16_t port);

// The first of them. An empty host: every interface, to listen on, for IPv6 and IPv4 if this host
// has both.
Address tcp_address(const std::string& host, uint16_t port);

// Parses Address::text() of a TCP address, without a look-up. Throws InvalidArgument.
Address parse_tcp_address(const std::string& text);

// A name in this machine's network namespace, not in the file system; at most 107 bytes.
Address abstract_unix_address(const std::string& name);

// Linux's default limit (4096) minus three: so `ss -l` distinguishes listeners of pycomm from
// others, and the attack of the tests finds them (tests/support/attack.py).
inline constexpr int kBacklog = 4093;

// Throws InvalidArgument if the address is in use or not of this machine. Port 0: a free port; see
// local_address().
Fd listen_on(const Address& address, int backlog = kBacklog);

Address local_address(int fd);

// The system's policy forbids a connection to that address (EACCES, EPERM).
class Forbidden : public PeerLost {
 public:
  using PeerLost::PeerLost;
};

// Starts to connect. The socket becomes writable, or has an error, when the attempt is over;
// connect_error() then returns the result. Throws PeerLost if it cannot be started (no route, no
// free local port), and Forbidden. `from`: the local address to use; null: the route's.
Fd start_connect(const Address& address, const Address* from = nullptr);

// The local address that the route to `address` uses. Sends nothing. False if there is no route.
bool source_towards(const Address& address, Address& source);

// 0: connected. EINPROGRESS: not yet. Otherwise the error; a refused connection is ECONNREFUSED.
// The kernel returns an error only once: do not call again after one.
int connect_error(int fd);

// Selects BBR for a connection that started without it, if BBR is the system's default. BBR paces
// packets by timers, which remain for the life of the connection, even if another algorithm is
// selected later: between two namespaces 4 KiB then took up to 2 ms, and 12 us without.
void pace_if_usual(int fd);

// The same even if BBR is not the system's default. No effect if the system does not offer it.
void pace(int fd);

// The unacknowledged bytes of a connection fit into its send buffer, so a buffer limits the rate to
// its size in each round trip. Sets the largest buffer that an unprivileged process may set, if the
// kernel does not enlarge the buffer that far by itself.
void enlarge_send_buffer(int fd);

// Whether the process at the other end of a Unix socket had this process's user id when it
// connected or started to listen. `user` becomes its id.
bool is_our_user(int fd, uint32_t& user);

// Enables keepalive probes after a minute without data, for a TCP connection that may be idle for
// hours: firewalls and load balancers drop idle flows after some minutes. If the peer's host does
// not answer, the connection ends after two minutes. No effect on a Unix socket.
void keep_alive(int fd);

// The next waiting connection, or an empty Fd if there is none. If this process or this machine has
// no descriptor (or memory) left, the Fd is empty too, `*exhausted` becomes true, and the
// connection keeps waiting. The listener then stays readable: close a descriptor, or exclude the
// listener from polls for a while; otherwise the loop spins.
Fd accept_from(int fd, bool* exhausted = nullptr);

// poll() on one descriptor: the events, or 0 if the limit passed first.
short poll_one(int fd, short events, std::chrono::nanoseconds limit);

// The text of an errno: "Connection refused".
std::string error_text(int error);

// This process or machine has no descriptor left. Not a failure of a peer.
class OutOfDescriptors : public Unsupported {
 public:
  using Unsupported::Unsupported;
};

// Throws InternalError: "<doing> failed: <text of errno> (errno N)"; or OutOfDescriptors.
[[noreturn]] void throw_errno(const std::string& doing);

}  // namespace pycomm::os
