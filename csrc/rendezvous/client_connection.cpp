// See client_connection.h.
#include "rendezvous/client_connection.h"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <utility>

namespace pycomm::rendezvous {
namespace {

constexpr size_t kReadBytes = 1 << 16;

}  // namespace

pollfd ClientConnection::awaited() const {
  const int fd = handshake_ ? handshake_->fd() : socket_.get();
  const bool sends = handshake_ ? handshake_sends_ : !out_.empty();
  return {fd, static_cast<short>(sends ? POLLOUT : POLLIN), 0};
}

Clock::time_point ClientConnection::deadline() const {
  if (handshake_) return Clock::now() + handshake_->deadline().left();
  return waiting_ ? wait_end_ : Clock::time_point::max();
}

bool ClientConnection::advance(short events, RequestHandler& handler) {
  if (handshake_) return advance_handshake(events);
  if (!out_.empty()) return events == 0 || send();
  if (waiting_) return events == 0 && answer(handler);  // a waiting client must not send
  return events == 0 || receive(handler);
}

bool ClientConnection::advance_handshake(short events) {
  if (events == 0 && !handshake_->deadline().expired()) return true;
  switch (handshake_->advance()) {
    case transport::Handshake::Step::want_read:
      handshake_sends_ = false;
      return true;
    case transport::Handshake::Step::want_write:
      handshake_sends_ = true;
      return true;
    case transport::Handshake::Step::refused:
      return false;
    case transport::Handshake::Step::done:
      break;
  }
  socket_ = handshake_->release();
  handshake_.reset();
  return true;
}

// Never reads past the end of the current request, so that at most one is in memory.
bool ClientConnection::receive(RequestHandler& handler) {
  auto parsed = store_frame::parse_request(in_);
  const size_t had = in_.size();
  in_.resize(had + std::min(kReadBytes, parsed.needed - had));
  const ssize_t got = ::recv(socket_.get(), in_.data() + had, in_.size() - had, 0);
  const int error = errno;
  in_.resize(had + static_cast<size_t>(std::max<ssize_t>(got, 0)));
  if (got <= 0) return got < 0 && (error == EAGAIN || error == EINTR);
  parsed = store_frame::parse_request(in_);
  if (parsed.parse != store_frame::Parse::complete) return parsed.parse == store_frame::Parse::more;
  in_.clear();
  wait_end_ = Clock::now() + std::min<std::chrono::milliseconds>(
                                 std::chrono::milliseconds(parsed.frame.wait_ms), kLongestWait);
  waiting_ = std::move(parsed.frame);
  return answer(handler);
}

bool ClientConnection::answer(RequestHandler& handler) {
  auto reply = handler.handle(*waiting_);
  if (!reply) {
    if (Clock::now() < wait_end_) return true;
    reply = {store_frame::Status::absent, ""};
  }
  waiting_.reset();
  out_ = store_frame::encode(*reply);
  sent_ = 0;
  return send();
}

bool ClientConnection::send() {
  while (sent_ < out_.size()) {
    const ssize_t got =
        ::send(socket_.get(), out_.data() + sent_, out_.size() - sent_, MSG_NOSIGNAL);
    if (got < 0 && errno == EAGAIN) return true;
    if (got < 0 && errno != EINTR) return false;
    if (got > 0) sent_ += static_cast<size_t>(got);
  }
  out_.clear();
  return true;
}

}  // namespace pycomm::rendezvous
