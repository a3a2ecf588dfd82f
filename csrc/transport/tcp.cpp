#include "transport/tcp.h"

#include <arpa/inet.h>
#include <linux/tcp.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <optional>
#include <sstream>
#include <string_view>
#include <vector>

#include "os/interfaces.h"
#include "os/socket.h"
#include "transport/graceful_close.h"

namespace pycomm::transport {
namespace {

// Bytes that are read ahead. A header and a small message take one system call; of a large message
// at most kReadAhead bytes are copied twice.
constexpr size_t kReadAhead = size_t{4} << 10;
constexpr size_t kBufferBytes = size_t{256} << 10;

// Maximum unsent bytes in the kernel: enough for the time in which a sleeping thread wakes up (0.2
// ms at 10 Gbit/s), and few enough that they are still in the cache when they are sent.
constexpr int kUnsentBytes = 512 << 10;

// Maximum bytes to wait for before a wake-up, which costs as much as tens of kilobytes of traffic.
// With more, ranks in a chain would not overlap.
constexpr size_t kMostAwaited = size_t{256} << 10;

// Below this round-trip time the hosts are in one local network.
constexpr std::chrono::milliseconds kNear{1};

// From this round-trip time on, slow start after a pause and recovery from a lost packet take
// longer than the data. `bench links --delay 50ms --pauses 1 --loss 0,0.1` with 16 MiB at 1 Gbit/s:
// 0.19 s with BBR and 0.38 s with Reno; with loss 0.38 s and 31 s.
constexpr std::chrono::milliseconds kFar{10};

template <typename T>
void set_tcp(int fd, int option, const T& value) {
  ::setsockopt(fd, IPPROTO_TCP, option, &value, sizeof value);
}

// BBR is for long distances. On a short one its timers cost more processor time than the data: an
// all_reduce of 16 MiB between two namespaces at 10 Gbit/s took 30 ms with it, and 22 without.
void adapt_to_distance(int fd, std::chrono::microseconds round_trip) {
  if (round_trip >= kFar) {
    os::pace(fd);
    os::enlarge_send_buffer(fd);
  } else if (round_trip >= kNear) {
    os::pace_if_usual(fd);
  }
}

// The shortest of the connection so far; 0 if it cannot be read.
std::chrono::microseconds shortest_round_trip(int fd) {
  tcp_info info{};
  socklen_t length = sizeof info;
  if (::getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &length) != 0) return {};
  return std::chrono::microseconds(info.tcpi_min_rtt);
}

class TcpChannel final : public Channel {
 public:
  explicit TcpChannel(os::Fd fd)
      : fd_(std::move(fd)), round_trip_(shortest_round_trip(fd_.get())), buffer_(kBufferBytes) {
    set_tcp(fd_.get(), TCP_NODELAY, 1);
    set_tcp(fd_.get(), TCP_NOTSENT_LOWAT, kUnsentBytes);
    adapt_to_distance(fd_.get(), round_trip_);
  }

  ~TcpChannel() override { close_gracefully(std::move(fd_), {}); }

  std::string_view transport() const override { return "tcp"; }
  std::chrono::microseconds round_trip() const override { return round_trip_; }

  size_t send(ConstBytes head, ConstBytes body) override {
    if (closed_) return head.size() + body.size();
    std::array<iovec, 2> parts{{{const_cast<std::byte*>(head.data()), head.size()},
                                {const_cast<std::byte*>(body.data()), body.size()}}};
    msghdr message{};
    message.msg_iov = parts.data();
    message.msg_iovlen = parts.size();
    for (;;) {
      // Without MSG_MORE a frame of 64 KiB ends in a packet of a few hundred bytes.
      const int wait = more_ ? MSG_MORE : 0;
      const auto n = ::sendmsg(fd_.get(), &message, MSG_DONTWAIT | MSG_NOSIGNAL | wait);
      if (n >= 0) return static_cast<size_t>(n);
      if (errno == EINTR) continue;
      if (errno == EAGAIN || errno == EWOULDBLOCK) return 0;
      closed_ = true;  // bytes that it sent before can still be read
      return head.size() + body.size();
    }
  }

  void expect_more(bool more) override { more_ = more; }
  bool polling_is_expensive() const override { return true; }

  ConstBytes peek(size_t want) override {
    want = std::min(want, kBufferBytes);
    if (end_ - begin_ < want) {
      if (begin_ + want > kBufferBytes || begin_ == end_) {
        std::memmove(buffer_.data(), buffer_.data() + begin_, end_ - begin_);
        end_ -= begin_;
        begin_ = 0;
      }
      end_ += read({buffer_.data() + end_, begin_ + want - end_});
    }
    return {buffer_.data() + begin_, std::min(want, end_ - begin_)};
  }

  void take(size_t bytes) override { begin_ += bytes; }

  size_t receive(Bytes into) override {
    if (begin_ == end_) {
      if (into.size() >= kReadAhead) return read(into);
      begin_ = 0;
      end_ = read({buffer_.data(), kReadAhead});
    }
    const size_t n = std::min(into.size(), end_ - begin_);
    if (n == 0) return 0;  // memcpy from a null pointer is undefined even for 0 bytes
    std::memcpy(into.data(), buffer_.data() + begin_, n);
    begin_ += n;
    return n;
  }

  bool is_closed() const override { return closed_; }

  pollfd arm(Want want) override {
    // POLLRDHUP reports a closed peer even if there is nothing to read.
    if (want.receive) wake_at(want.bytes - std::min(want.bytes, end_ - begin_));
    const int events = (want.receive ? POLLIN : 0) | (want.send ? POLLOUT : 0) | POLLRDHUP;
    return {fd_.get(), static_cast<short>(events), 0};
  }

  void disarm(short revents) override {
    if ((revents & (POLLRDHUP | POLLHUP | POLLERR)) != 0) closed_ = true;
  }

  // Drops whatever the peer sends from now on.
  void close(ConstBytes unsent) override {
    close_gracefully(std::move(fd_), unsent);
    closed_ = true;
  }

 private:
  // Sets how many bytes must arrive before poll(2) returns; a closed peer ends it immediately.
  void wake_at(size_t bytes) {
    const int least = static_cast<int>(std::clamp<size_t>(bytes, 1, kMostAwaited));
    if (least == wakes_at_) return;
    if (::setsockopt(fd_.get(), SOL_SOCKET, SO_RCVLOWAT, &least, sizeof least) == 0)
      wakes_at_ = least;
  }

  size_t read(Bytes into) {
    for (;;) {
      const auto n = ::recv(fd_.get(), into.data(), into.size(), MSG_DONTWAIT);
      if (n > 0) return static_cast<size_t>(n);
      if (n < 0 && errno == EINTR) continue;
      if (n == 0 || (errno != EAGAIN && errno != EWOULDBLOCK)) closed_ = true;
      return 0;
    }
  }

  os::Fd fd_;
  std::chrono::microseconds round_trip_;
  std::vector<std::byte> buffer_;
  size_t begin_ = 0, end_ = 0;  // what was read ahead
  bool closed_ = false;
  bool more_ = false;
  int wakes_at_ = 1;
};

// The loopback address of rank 0, if it has one: then all ranks run on this host. Host names other
// than "localhost" are not looked up: a host's own name may be its loopback address here and its
// network address elsewhere.
std::optional<os::Address> loopback_of(const std::string& towards) {
  const std::string host = towards == "localhost" ? "127.0.0.1" : towards;
  in6_addr parsed{};
  if (::inet_pton(AF_INET, host.c_str(), &parsed) != 1 &&
      ::inet_pton(AF_INET6, host.c_str(), &parsed) != 1)
    return std::nullopt;
  const os::Address address = os::tcp_address(host, 0);
  return address.is_loopback() ? std::optional(address) : std::nullopt;
}

class Tcp final : public SocketTransport {
 public:
  Tcp(const std::string& choice, const std::string& towards) {
    if (const auto loopback = loopback_of(towards); loopback && choice.empty()) {
      listeners_.push_back(os::listen_on(*loopback));
      publish(os::local_address(listeners_[0].get()));
      return;
    }
    if (choice.empty()) {
      listeners_.push_back(os::listen_on(os::tcp_address("", 0)));
      const auto port = os::local_address(listeners_[0].get()).port();
      for (const os::Address& address : os::offered_addresses(towards))
        publish(address.with_port(port));
      return;
    }
    sources_ = os::chosen_addresses(choice);
    for (const os::Address& address : sources_) {
      listeners_.push_back(os::listen_on(address));
      publish(os::local_address(listeners_.back().get()));
    }
  }

  std::string_view name() const override { return "tcp"; }
  const std::string& address() const override { return address_; }
  std::vector<int> listeners() const override {
    std::vector<int> fds;
    for (const os::Fd& listener : listeners_) fds.push_back(listener.get());
    return fds;
  }

  // A loopback address is the best one on the same host and unusable on another.
  std::vector<std::string> candidates(const std::string& address, bool same_host) const override {
    std::vector<std::string> inside, outside;
    std::istringstream words(address);
    for (std::string word; words >> word;)
      (os::parse_tcp_address(word).is_loopback() ? inside : outside).push_back(word);
    if (!same_host) return outside;
    inside.insert(inside.end(), outside.begin(), outside.end());
    return inside;
  }

  os::Fd start_connect(const std::string& address) const override {
    const os::Address to = os::parse_tcp_address(address);
    const auto from = std::ranges::find(sources_, to.storage.ss_family,
                                        [](const os::Address& a) { return a.storage.ss_family; });
    return os::start_connect(to, from == sources_.end() ? nullptr : &*from);
  }

  void send_memory(int) override {}
  bool exchanges() const override { return false; }
  std::unique_ptr<Channel> accept(os::Fd fd, const Deadline&) override {
    return std::make_unique<TcpChannel>(std::move(fd));
  }

 private:
  void publish(const os::Address& address) {
    address_ += (address_.empty() ? "" : " ") + address.text();
  }

  std::vector<os::Fd> listeners_;
  std::vector<os::Address> sources_;  // the chosen ones
  std::string address_;
};

}  // namespace

std::unique_ptr<SocketTransport> make_tcp(const std::string& choice, const std::string& towards) {
  return std::make_unique<Tcp>(choice, towards);
}

}  // namespace pycomm::transport
