// See socket.h.
#include "os/socket.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/un.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <memory>
#include <system_error>

#include "core/errors.h"

namespace pycomm {
namespace {

std::string reason(int error) { return std::generic_category().message(error); }

Fd open_stream(int family) {
  Fd fd(::socket(family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!fd) throw_errno("opening a socket");
  return fd;
}

// Small frames must not wait for the acknowledgement of earlier ones.
void send_at_once(int fd, int family) {
  if (family != AF_INET && family != AF_INET6) return;
  const int on = 1;
  ::setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
}

const sockaddr* as_sockaddr(const Address& address) {
  return reinterpret_cast<const sockaddr*>(&address.storage);
}

std::string numeric_host(const Address& address) {
  char text[INET6_ADDRSTRLEN] = "";
  const void* bytes = address.storage.ss_family == AF_INET
                          ? static_cast<const void*>(
                                &reinterpret_cast<const sockaddr_in*>(&address.storage)->sin_addr)
                          : &reinterpret_cast<const sockaddr_in6*>(&address.storage)->sin6_addr;
  ::inet_ntop(address.storage.ss_family, bytes, text, sizeof text);
  return text;
}

struct Reach {
  int order;  // 0, 1: global IPv4, IPv6; 2, 3: loopback
  std::string host;
};

// Where an interface's address comes in the list; order -1 when it is of no use to others.
Reach reach_of(const ifaddrs& entry) {
  if (entry.ifa_addr == nullptr || (entry.ifa_flags & IFF_UP) == 0) return {-1, ""};
  const int family = entry.ifa_addr->sa_family;
  if (family != AF_INET && family != AF_INET6) return {-1, ""};
  Address address;
  address.length = family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
  std::memcpy(&address.storage, entry.ifa_addr, address.length);
  int order = (entry.ifa_flags & IFF_LOOPBACK) != 0 ? 2 : 0;
  if (family == AF_INET6) {
    const auto& v6 = reinterpret_cast<const sockaddr_in6*>(&address.storage)->sin6_addr;
    if (IN6_IS_ADDR_LINKLOCAL(&v6)) return {-1, ""};
    ++order;
  } else {
    const auto& v4 = reinterpret_cast<const sockaddr_in*>(&address.storage)->sin_addr;
    if ((ntohl(v4.s_addr) >> 16) == 0xa9fe) return {-1, ""};  // 169.254.0.0/16
  }
  return {order, numeric_host(address)};
}

}  // namespace

void throw_errno(const std::string& doing) {
  const int error = errno;
  throw InternalError(doing + " failed: " + reason(error) + " (errno " + std::to_string(error) +
                      ")");
}

std::string Address::host() const {
  if (storage.ss_family == AF_UNIX) return text();
  return numeric_host(*this);
}

uint16_t Address::port() const {
  if (storage.ss_family == AF_INET)
    return ntohs(reinterpret_cast<const sockaddr_in*>(&storage)->sin_port);
  if (storage.ss_family == AF_INET6)
    return ntohs(reinterpret_cast<const sockaddr_in6*>(&storage)->sin6_port);
  return 0;
}

std::string Address::text() const {
  if (storage.ss_family == AF_INET) return host() + ":" + std::to_string(port());
  if (storage.ss_family == AF_INET6) return "[" + host() + "]:" + std::to_string(port());
  const size_t skip = offsetof(sockaddr_un, sun_path) + 1;
  if (storage.ss_family != AF_UNIX || length <= skip) return "(no address)";
  return "@" + std::string(reinterpret_cast<const char*>(&storage) + skip, length - skip);
}

Address tcp_address(const std::string& host, uint16_t port) {
  addrinfo wanted{};
  wanted.ai_socktype = SOCK_STREAM;
  wanted.ai_flags = AI_NUMERICSERV | AI_PASSIVE;
  addrinfo* found = nullptr;
  const int failure = ::getaddrinfo(host.empty() ? nullptr : host.c_str(),
                                    std::to_string(port).c_str(), &wanted, &found);
  if (failure != 0)
    throw InvalidArgument("no address is known for the host '" + host +
                          "': " + ::gai_strerror(failure));
  const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> list(found, ::freeaddrinfo);
  const addrinfo* best = found;
  for (const addrinfo* entry = found; entry != nullptr; entry = entry->ai_next) {
    if (entry->ai_family != AF_INET) continue;
    best = entry;
    break;
  }
  Address address;
  address.length = best->ai_addrlen;
  std::memcpy(&address.storage, best->ai_addr, best->ai_addrlen);
  return address;
}

Address abstract_unix_address(const std::string& name) {
  sockaddr_un unix_address{};
  if (name.empty() || name.size() >= sizeof unix_address.sun_path)
    throw InvalidArgument("the name of a Unix socket has 1 to " +
                          std::to_string(sizeof unix_address.sun_path - 1) + " bytes, this one " +
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
  if (::bind(fd.get(), as_sockaddr(address), address.length) != 0 ||
      ::listen(fd.get(), backlog) != 0) {
    const int error = errno;
    throw InvalidArgument("cannot listen on " + address.text() + ": " + reason(error) + " (errno " +
                          std::to_string(error) + ")");
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

Fd start_connect(const Address& address) {
  Fd fd = open_stream(address.storage.ss_family);
  send_at_once(fd.get(), address.storage.ss_family);
  if (::connect(fd.get(), as_sockaddr(address), address.length) == 0) return fd;
  const int error = errno;
  // A refusal at once (the loopback, a Unix name nobody has, a Unix backlog that is full) leaves a
  // socket that hangs up when polled: connect_error() knows it by that.
  if (error == EINPROGRESS || error == EINTR || error == ECONNREFUSED || error == EAGAIN) return fd;
  throw PeerLost("cannot connect to " + address.text() + ": " + reason(error) + " (errno " +
                 std::to_string(error) + ")");
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
      // Not of the listener but of the connection that waited: it is gone, the next may be well.
      case EINTR:
      case ECONNABORTED:
      case EPROTO:
      case EPERM:
      case ENETDOWN:
      case ENETUNREACH:
      case EHOSTDOWN:
      case EHOSTUNREACH:
        continue;
    }
    throw_errno("accepting a connection");
  }
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

std::vector<std::string> interface_addresses() {
  ifaddrs* first = nullptr;
  if (::getifaddrs(&first) != 0) throw_errno("listing the network interfaces");
  const std::unique_ptr<ifaddrs, decltype(&::freeifaddrs)> list(first, ::freeifaddrs);
  std::vector<Reach> found;
  for (const ifaddrs* entry = first; entry != nullptr; entry = entry->ifa_next)
    if (Reach reach = reach_of(*entry); reach.order >= 0) found.push_back(std::move(reach));
  std::stable_sort(found.begin(), found.end(),
                   [](const Reach& a, const Reach& b) { return a.order < b.order; });
  std::vector<std::string> hosts;
  for (Reach& reach : found) hosts.push_back(std::move(reach.host));
  return hosts;
}

}  // namespace pycomm
