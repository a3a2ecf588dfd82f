#include "transport/ring_channel.h"

#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <span>

#include "core/errors.h"
#include "cpu/copy.h"
#include "os/processor.h"
#include "os/socket.h"

namespace pycomm::transport {
namespace {

// The writer publishes new bytes at least this often, so that the reader overlaps with its copy.
constexpr size_t kPublishBytes = size_t{32} << 10;

// Bytes on the wake-up socket: one wakes the reader, the other precedes a goodbye message.
constexpr char kWake = 0, kGoodbye = 1;
// More than any unsent frame and its notices; less than the buffer of a socket.
constexpr size_t kMaxGoodbyeBytes = size_t{128} << 10;

}  // namespace

RingChannel::RingChannel(std::string_view transport, std::shared_ptr<os::RingMemory> in,
                         std::shared_ptr<os::RingMemory> out, os::Fd wakeup_socket,
                         PeerMemory peer_memory)
    : transport_(transport),
      in_(std::move(in)),
      out_(std::move(out)),
      wakeup_socket_(std::move(wakeup_socket)),
      peer_memory_(std::move(peer_memory)),
      writer_(head_of(*out_), out_->bytes()),
      reader_(head_of(*in_)) {}

void RingChannel::wake_peer() {
  if (closed_) return;
  // A full socket already wakes the peer; poll(2) detects a dead peer.
  (void)::send(wakeup_socket_.get(), &kWake, 1, MSG_DONTWAIT | MSG_NOSIGNAL);
}

size_t RingChannel::put(ConstBytes bytes) {
  size_t done = 0;
  while (done < bytes.size()) {
    const size_t n = std::min({writer_.space(), bytes.size() - done, kPublishBytes});
    if (n == 0) break;
    cpu::copy(out_->ring() + writer_.position() % out_->bytes(), bytes.data() + done, n);
    done += n;
    if (writer_.publish(n)) wake_peer();
  }
  return done;
}

size_t RingChannel::send(ConstBytes head, ConstBytes body) {
  if (closed_) return head.size() + body.size();
  (void)swap_processors(os::current_processor());
  const size_t n = put(head);
  return n == head.size() ? n + put(body) : n;
}

ConstBytes RingChannel::peek(size_t want) {
  if (!remaining_.empty()) {
    const ConstBytes here = ConstBytes(remaining_).subspan(remaining_taken_);
    return here.first(std::min(here.size(), want));
  }
  const uint64_t available = reader_.available();
  if (available > in_->bytes()) {  // the peer wrote an invalid position
    corrupt_ = true;
    close({});
    return {};
  }
  return {in_->ring() + reader_.position() % in_->bytes(), std::min<size_t>(available, want)};
}

void RingChannel::take(size_t bytes) {
  if (!remaining_.empty()) {
    remaining_taken_ += bytes;
    return;
  }
  if (reader_.take(bytes)) wake_peer();
}

size_t RingChannel::receive(Bytes into) {
  const ConstBytes here = peek(std::min(into.size(), 2 * kPublishBytes));
  if (here.empty()) return 0;
  cpu::copy(into.data(), here.data(), here.size());
  take(here.size());
  return here.size();
}

int RingChannel::swap_processors(int own) {
  head_of(*out_).writer_processor.store(own + 1, std::memory_order_relaxed);
  return head_of(*in_).writer_processor.load(std::memory_order_relaxed) - 1;
}

void RingChannel::wake_by(const os::WakeEvent& event) {
  if (closed_) return;
  event.watch(wakeup_socket_.get(), readable_);
  wake_event_ = &event;
}

pollfd RingChannel::arm(Want want) {
  if (want.receive) reader_.arm();  // the caller polls for progress next
  if (want.send) writer_.arm();
  return {wake_event_ != nullptr ? -1 : wakeup_socket_.get(), POLLIN | POLLRDHUP, 0};
}

void RingChannel::disarm(short revents) {
  reader_.disarm();
  writer_.disarm();
  if ((revents == 0 && !readable_) || closed_) return;
  readable_ = false;
  std::array<char, 4096> bytes;
  for (;;) {
    const auto n = ::recv(wakeup_socket_.get(), bytes.data(), bytes.size(), MSG_DONTWAIT);
    if (n > 0) drain_wakeup(std::as_bytes(std::span(bytes).first(static_cast<size_t>(n))));
    if (n > 0 || (n < 0 && errno == EINTR)) continue;
    if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return;
    append_goodbye();
    end_watch();
    closed_ = true;
    return;
  }
}

void RingChannel::drain_wakeup(ConstBytes bytes) {
  if (goodbye_.empty())
    while (!bytes.empty() && bytes[0] == std::byte{kWake}) bytes = bytes.subspan(1);
  const size_t space = kMaxGoodbyeBytes - std::min(kMaxGoodbyeBytes, goodbye_.size());
  const ConstBytes kept = bytes.first(std::min(space, bytes.size()));
  goodbye_.insert(goodbye_.end(), kept.begin(), kept.end());
}

// After a goodbye on the socket the peer does not write to the ring any more: joins the bytes of
// the ring and the goodbye.
void RingChannel::append_goodbye() {
  if (goodbye_.empty()) return;
  const ConstBytes ring = peek(SIZE_MAX);
  if (corrupt_) return;
  std::vector<std::byte> rest(ring.begin(), ring.end());
  rest.insert(rest.end(), goodbye_.begin() + 1, goodbye_.end());
  remaining_ = std::move(rest);
}

// The kernel keeps the socket's buffer for the peer after close(). Its size is doubled first,
// because it may be full of wake-ups.
void RingChannel::send_goodbye(ConstBytes unsent) {
  int bytes = 0;
  socklen_t length = sizeof bytes;
  // setsockopt() doubles the value, and getsockopt() returns the doubled one.
  if (::getsockopt(wakeup_socket_.get(), SOL_SOCKET, SO_SNDBUF, &bytes, &length) == 0)
    ::setsockopt(wakeup_socket_.get(), SOL_SOCKET, SO_SNDBUF, &bytes, sizeof bytes);
  char mark = kGoodbye;
  std::array<iovec, 2> parts{{{&mark, 1}, {const_cast<std::byte*>(unsent.data()), unsent.size()}}};
  msghdr message{};
  message.msg_iov = parts.data();
  message.msg_iovlen = parts.size();
  (void)::sendmsg(wakeup_socket_.get(), &message, MSG_DONTWAIT | MSG_NOSIGNAL);
}

void RingChannel::end_watch() {
  if (wake_event_ != nullptr) wake_event_->unwatch(wakeup_socket_.get());
  wake_event_ = nullptr;
}

void RingChannel::close(ConstBytes unsent) {
  if (wakeup_socket_ && !unsent.empty()) send_goodbye(unsent);
  // A forked process has the descriptor too and would keep the connection open without this.
  if (wakeup_socket_) ::shutdown(wakeup_socket_.get(), SHUT_RDWR);
  end_watch();
  wakeup_socket_ = {};
  closed_ = true;
}

}  // namespace pycomm::transport
