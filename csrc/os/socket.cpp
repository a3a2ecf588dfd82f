// See socket.h.
#include "os/socket.h"

#include <arpa/inet.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/un.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <cstddef>
#include <cstring>
#include <fstream>
#include <memory>
#include <string_view>
#include <system_error>

#include "core/errors.h"

namespace pycomm::os {
namespace {

constexpr std::string_view kPaced = "bbr";

bool is_paced(int fd) {
  std::array<char, 16> name{};
  auto length = static_cast<socklen_t>(name.size());
  return ::getsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, name.data(), &length) == 0 &&
         name.data() == kPaced;
}

bool take_congestion_control(int fd, std::string_view name) {
  return ::setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, name.data(),
                      static_cast<socklen_t>(name.size())) == 0;
}

// 0 if the file cannot be read, as in a container of an older kernel.
int last_number_of(const char* path) {
  std::ifstream file(path);
  int number = 0;
  while (file >> number) {
  }
  return number;
}

// Accepted connections inherit the listener's congestion control.
Fd open_stream(int family) {
  Fd fd(::socket(family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!fd) throw_errno("opening a socket");
  if (family != AF_UNIX && is_paced(fd.get()) && !take_congestion_control(fd.get(), "cubic"))
    take_congestion_control(fd.get(), "reno");  // always allowed
  return fd;
}

// Small frames must not wait for the acknowledgement of earlier ones.
void send_at_once(int fd, int family) {
  if (family != AF_INET && family != AF_INET6) return;
  const int on = 1;
  ::setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
}

constexpr int kKeepIdleS = 60, kKeepIntervalS = 15, kKeepProbes = 4;

const sockaddr* as_sockaddr(const Address& address) {
  return reinterpret_cast<const sockaddr*>(&address.storage);
}

const sockaddr_in& as_ipv4(const Address& address) {
  return reinterpret_cast<const sockaddr_in&>(address.storage);
}

const sockaddr_in6& as_ipv6(const Address& address) {
  return reinterpret_cast<const sockaddr_in6&>(address.storage);
}

std::string numeric_host(const Address& address) {
  std::array<char, INET6_ADDRSTRLEN> text{};
  if (address.storage.ss_family == AF_INET) {
    ::inet_ntop(AF_INET, &as_ipv4(address).sin_addr, text.data(), text.size());
    return text.data();
  }
  const sockaddr_in6& ipv6 = as_ipv6(address);
  ::inet_ntop(AF_INET6, &ipv6.sin6_addr, text.data(), text.size());
  std::array<char, IF_NAMESIZE> name{};
  if (ipv6.sin6_scope_id == 0) return text.data();
  const bool named = ::if_indextoname(ipv6.sin6_scope_id, name.data()) != nullptr;
  return std::string(text.data()) + "%" +
         (named ? name.data() : std::to_string(ipv6.sin6_scope_id));
}

Address copy_of(const sockaddr* from, socklen_t length) {
  Address address;
  address.length = length;
  std::memcpy(&address.storage, from, length);
  return address;
}

Address every_interface(uint16_t port) {
  // A kernel without IPv6 has no such sockets; if IPv6 is only disabled, they do no harm.
  if (const Fd probe(::socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC, 0)); probe) {
    sockaddr_in6 any{};
    any.sin6_family = AF_INET6;
    any.sin6_port = htons(port);
    return copy_of(reinterpret_cast<const sockaddr*>(&any), sizeof any);
  }
  sockaddr_in any{};
  any.sin_family = AF_INET;
  any.sin_port = htons(port);
  return copy_of(reinterpret_cast<const sockaddr*>(&any), sizeof any);
}

// The address of every interface accepts both families, regardless of the system's default.
void set_families(int fd, const Address& address) {
  if (address.storage.ss_family != AF_INET6) return;
  const int ipv6_only = IN6_IS_ADDR_UNSPECIFIED(&as_ipv6(address).sin6_addr) ? 0 : 1;
  if (::setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &ipv6_only, sizeof ipv6_only) != 0)
    throw_errno("setting IPV6_V6ONLY");
}

// connect() chooses the port, so that connections to different peers can share it.
void bind_source(int fd, const Address& from) {
  const int on = 1;
  ::setsockopt(fd, IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT, &on, sizeof on);
  const Address source = from.with_port(0);
  if (::bind(fd, as_sockaddr(source), source.length) == 0) return;
  const int error = errno;
  throw PeerLost("cannot connect from " + from.host() + ": " + error_text(error) + " (errno " +
                 std::to_string(error) + ")");
}

}  // namespace

std::string error_text(int error) { return std::generic_category().message(error); }

void throw_errno(const std::string& doing) {
  const int error = errno;
  if (error == EMFILE || error == ENFILE) {
    rlimit limit{};
    ::getrlimit(RLIMIT_NOFILE, &limit);
    throw OutOfDescriptors(doing + " failed: " + error_text(error) + ": this process may have " +
                           std::to_string(limit.rlim_cur) +
                           " descriptors; raise the limit (ulimit -n), or make fewer groups");
  }
  throw InternalError(doing + " failed: " + error_text(error) + " (errno " + std::to_string(error) +
                      ")");
}

std::string Address::host() const {
  if (storage.ss_family == AF_UNIX) return text();
  return numeric_host(*this);
}

uint16_t Address::port() const {
  if (storage.ss_family == AF_INET) return ntohs(as_ipv4(*this).sin_port);
  if (storage.ss_family == AF_INET6) return ntohs(as_ipv6(*this).sin6_port);
  return 0;
}

Address Address::with_port(uint16_t port) const {
  Address other = *this;
  if (storage.ss_family == AF_INET)
    reinterpret_cast<sockaddr_in&>(other.storage).sin_port = htons(port);
  if (storage.ss_family == AF_INET6)
    reinterpret_cast<sockaddr_in6&>(other.storage).sin6_port = htons(port);
  return other;
}

bool Address::is_loopback() const {
  if (storage.ss_family == AF_INET) return (ntohl(as_ipv4(*this).sin_addr.s_addr) >> 24) == 127;
  return storage.ss_family == AF_INET6 && IN6_IS_ADDR_LOOPBACK(&as_ipv6(*this).sin6_addr);
}

bool Address::is_link_local() const {
  if (storage.ss_family == AF_INET)
    return (ntohl(as_ipv4(*this).sin_addr.s_addr) >> 16) == 0xa9fe;  // 169.254.0.0/16
  return storage.ss_family == AF_INET6 && IN6_IS_ADDR_LINKLOCAL(&as_ipv6(*this).sin6_addr);
}

std::string Address::text() const {
  if (storage.ss_family == AF_INET) return host() + ":" + std::to_string(port());
  if (storage.ss_family == AF_INET6) return "[" + host() + "]:" + std::to_string(port());
  const size_t skip = offsetof(sockaddr_un, sun_path) + 1;
  if (storage.ss_family != AF_UNIX || length <= skip) return "(no address)";
  return "@" + std::string(reinterpret_cast<const char*>(&storage) + skip, length - skip);
}

std::vector<Address> tcp_addresses(const std::string& host, uint16_t port) {
  addrinfo wanted{};
  wanted.ai_socktype = SOCK_STREAM;
  wanted.ai_flags = AI_NUMERICSERV;
  addrinfo* found = nullptr;
  const int failure = ::getaddrinfo(host.c_str(), std::to_string(port).c_str(), &wanted, &found);
  if (failure != 0)
    throw InvalidArgument("cannot resolve the host '" + host + "': " + ::gai_strerror(failure));
  const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> list(found, ::freeaddrinfo);
  std::vector<Address> addresses;
  for (const addrinfo* entry = found; entry != nullptr; entry = entry->ai_next)
    addresses.push_back(copy_of(entry->ai_addr, entry->ai_addrlen));
  std::ranges::stable_partition(
      addresses, [](const Address& address) { return address.storage.ss_family == AF_INET; });
  const Address& first = addresses.at(0);
  if (first.storage.ss_family == AF_INET6 && first.is_link_local() &&
      as_ipv6(first).sin6_scope_id == 0)
    throw InvalidArgument("invalid address '" + host +
                          "': a link-local address needs its interface, as in " + host + "%eth0");
  return addresses;
}

Address tcp_address(const std::string& host, uint16_t port) {
  return host.empty() ? every_interface(port) : tcp_addresses(host, port)[0];
}

Address parse_tcp_address(const std::string& text) {
  const auto colon = text.rfind(':');
  const bool bracketed = colon != std::string::npos && colon >= 2 && text[0] == '[';
  const std::string host =
      bracketed ? text.substr(1, colon - 2) : text.substr(0, std::min(colon, text.size()));
  const char* end = text.data() + text.size();
  uint16_t port = 0;
  const auto read = std::from_chars(text.data() + std::min(colon + 1, text.size()), end, port);
  Address address;
  auto& ipv4 = reinterpret_cast<sockaddr_in&>(address.storage);
  auto& ipv6 = reinterpret_cast<sockaddr_in6&>(address.storage);
  const bool is_address = bracketed ? text[colon - 1] == ']' &&
                                          ::inet_pton(AF_INET6, host.c_str(), &ipv6.sin6_addr) == 1
                                    : ::inet_pton(AF_INET, host.c_str(), &ipv4.sin_addr) == 1;
  if (colon == std::string::npos || read.ec != std::errc{} || read.ptr != end || !is_address)
    throw InvalidArgument("invalid address '" + text +
                          "': expected a form like 127.0.0.1:14758 or [::1]:14758");
  address.storage.ss_family = bracketed ? AF_INET6 : AF_INET;
  address.length = bracketed ? sizeof ipv6 : sizeof ipv4;
  return address.with_port(port);
}

Address abstract_unix_address(const std::string& name) {
  sockaddr_un unix_address{};
  if (name.empty() || name.size() >= sizeof unix_address.sun_path)
    throw InvalidArgument("invalid name of a Unix socket: it must have 1 to " +
                          std::to_string(sizeof unix_address.sun_path - 1) + " bytes, got " +
                          std::to_string(name.size()));
  unix_address.sun_family = AF_UNIX;
  std::memcpy(unix_address.sun_path + 1, name.data(), name.size());
  Address address;
  address.length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  std::memcpy(&address.storage, &unix_address, sizeof unix_address);
  return address;
}

Fd listen_on(const Address& address, int backlog) {
  Fd fd = open_stream(address.storage.ss_family);
  const int on = 1;
  if (::setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) != 0)
    throw_errno("setting SO_REUSEADDR");
  set_families(fd.get(), address);
  if (::bind(fd.get(), as_sockaddr(address), address.length) != 0 ||
      ::listen(fd.get(), backlog) != 0) {
    const int error = errno;
    throw InvalidArgument("cannot listen on " + address.text() + ": " + error_text(error) +
                          " (errno " + std::to_string(error) + ")");
  }
  return fd;
}

Address local_address(int fd) {
  Address address;
  address.length = sizeof address.storage;
  if (::getsockname(fd, reinterpret_cast<sockaddr*>(&address.storage), &address.length) != 0)
    throw_errno("asking a socket for its address");
  return address;
}

Fd start_connect(const Address& address, const Address* from) {
  Fd fd = open_stream(address.storage.ss_family);
  send_at_once(fd.get(), address.storage.ss_family);
  if (from != nullptr) bind_source(fd.get(), *from);
  if (::connect(fd.get(), as_sockaddr(address), address.length) == 0) return fd;
  const int error = errno;
  // After an immediate refusal (loopback, unknown Unix name, full Unix backlog) poll() reports
  // POLLHUP, by which connect_error() recognizes it.
  if (error == EINPROGRESS || error == EINTR || error == ECONNREFUSED || error == EAGAIN) return fd;
  const std::string why = "cannot connect to " + address.text() + ": " + error_text(error) +
                          " (errno " + std::to_string(error) + ")";
  if (error == EACCES || error == EPERM) throw Forbidden(why);
  throw PeerLost(why);
}

bool source_towards(const Address& address, Address& source) {
  // connect() of a datagram socket only looks up the route; the port (discard) does not matter.
  const Fd fd(::socket(address.storage.ss_family, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  const Address to = address.with_port(9);
  if (!fd || ::connect(fd.get(), as_sockaddr(to), to.length) != 0) return false;
  source = local_address(fd.get()).with_port(0);
  return true;
}

int connect_error(int fd) {
  const short events = poll_one(fd, POLLOUT, std::chrono::nanoseconds{0});
  if (events == 0) return EINPROGRESS;
  int error = 0;
  socklen_t length = sizeof error;
  if (::getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &length) != 0)
    throw_errno("asking a socket for its error");
  if (error == 0 && (events & POLLHUP) != 0) return ECONNREFUSED;
  return error;
}

void pace_if_usual(int fd) {
  const Fd other(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (other && is_paced(other.get())) pace(fd);
}

void pace(int fd) { take_congestion_control(fd, kPaced); }

void enlarge_send_buffer(int fd) {
  // SO_SNDBUF ends the kernel's own growth, and the kernel doubles its value.
  const int most = last_number_of("/proc/sys/net/core/wmem_max");
  if (most <= last_number_of("/proc/sys/net/ipv4/tcp_wmem") / 2) return;
  ::setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &most, sizeof most);
}

Fd accept_from(int fd, bool* exhausted) {
  if (exhausted != nullptr) *exhausted = false;
  while (true) {
    Fd peer(::accept4(fd, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (peer) {
      send_at_once(peer.get(), local_address(peer.get()).storage.ss_family);
      return peer;
    }
    switch (errno) {
      case EAGAIN:
        return {};
      case EMFILE:
      case ENFILE:
      case ENOBUFS:
      case ENOMEM:
        if (exhausted != nullptr) *exhausted = true;
        return {};
      // Errors of the waiting connection, not of the listener: try the next one.
      case EINTR:
      case ECONNABORTED:
      case EPROTO:
      case EPERM:
      case ENETDOWN:
      case ENETUNREACH:
      case EHOSTDOWN:
      case EHOSTUNREACH:
      case ENOPROTOOPT:
      case ENONET:
      case EOPNOTSUPP:
        continue;
    }
    throw_errno("accepting a connection");
  }
}

bool is_our_user(int fd, uint32_t& user) {
  ucred peer{};
  socklen_t bytes = sizeof peer;
  if (::getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &bytes) != 0)
    throw_errno("asking for the user of a peer");
  user = peer.uid;
  return user == ::geteuid();
}

void keep_alive(int fd) {
  const int on = 1;
  if (::setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &kKeepIdleS, sizeof kKeepIdleS) != 0) return;
  ::setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &kKeepIntervalS, sizeof kKeepIntervalS);
  ::setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &kKeepProbes, sizeof kKeepProbes);
  ::setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
}

short poll_one(int fd, short events, std::chrono::nanoseconds limit) {
  const auto end = std::chrono::steady_clock::now() + limit;
  while (true) {
    pollfd entry{fd, events, 0};
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(
        std::max(end - std::chrono::steady_clock::now(), std::chrono::steady_clock::duration{0}));
    const int wait_ms =
        static_cast<int>(std::min<std::chrono::milliseconds::rep>(left.count(), 1'000'000));
    const int ready = ::poll(&entry, 1, wait_ms);
    if (ready > 0) return entry.revents;
    if (ready < 0 && errno != EINTR) throw_errno("polling a socket");
    if (wait_ms == 0 || std::chrono::steady_clock::now() >= end) return 0;
  }
}

}  // namespace pycomm::os
