#include "group/doorman.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "core/errors.h"
#include "os/thread.h"

namespace pycomm {
namespace {

// Somebody who left, or died, does not come back: a call that nobody takes is made for 1 s.
constexpr int kRefusals = 20;
constexpr std::chrono::hours kIdle{1};

Fd event() { return Fd(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)); }

void ring(const Fd& event) {
  const uint64_t one = 1;
  (void)!::write(event.get(), &one, sizeof one);
}

void silence(const Fd& event) {
  uint64_t count = 0;
  (void)!::read(event.get(), &count, sizeof count);
}

}  // namespace

Doorman::Doorman(Lobby::Request request, size_t ring_bytes) : wake_(event()), arrived_(event()) {
  for (const auto& contact : request.contacts) local_.push_back(contact.transport == nullptr);
  const auto me = static_cast<size_t>(request.rank);
  bool by_socket = false, in_process = false;
  for (size_t i = 0; i < local_.size(); ++i)
    if (i != me) (local_[i] ? in_process : by_socket) = true;
  if (in_process)
    listener_.emplace(InProcessGroup{request.context, request.agreed}, request.rank, ring_bytes,
                      [this](int peer, std::unique_ptr<Channel> channel) {
                        std::vector<ConnectResult> one(1);
                        one[0] = {.peer = peer, .channel = std::move(channel)};
                        deliver(std::move(one));
                      });
  if (!by_socket) return;
  request.refusals = kRefusals;
  lobby_.emplace(std::move(request));
  thread_ = start_thread("pycomm-door", [this] { loop(); });
}

void Doorman::request(int peer) {
  if (local_[static_cast<size_t>(peer)]) {
    if (listener_->call(peer)) return;
    std::vector<ConnectResult> none(1);
    none[0] = {.peer = peer, .why = "it has left"};
    return deliver(std::move(none));
  }
  {
    const std::lock_guard lock(mutex_);
    wanted_.push_back(peer);
  }
  ring(wake_);
}

std::vector<ConnectResult> Doorman::take() {
  if (!news_.load()) return {};
  const std::lock_guard lock(mutex_);
  silence(arrived_);
  news_.store(false);
  return std::exchange(inbox_, {});
}

void Doorman::deliver(std::vector<ConnectResult> arrivals) {
  if (arrivals.empty()) return;
  const std::lock_guard lock(mutex_);
  for (ConnectResult& arrival : arrivals) inbox_.push_back(std::move(arrival));
  news_.store(true);
  ring(arrived_);
}

void Doorman::close() noexcept {
  listener_.reset();
  ending_.store(true);
  ring(wake_);
  if (thread_.joinable()) thread_.join();
  lobby_.reset();
}

// What the world does to a connection is an arrival; what ends up here is our own: no memory left.
// Nobody is met any more, and the engine is told so of everybody.
void Doorman::loop() noexcept {
  try {
    serve();
  } catch (const std::exception& error) {
    std::vector<ConnectResult> nobody;
    for (size_t i = 0; i < local_.size(); ++i)
      if (!local_[i])
        nobody.push_back({.peer = static_cast<int>(i),
                          .why = std::string("this rank connects no more: ") + error.what()});
    deliver(std::move(nobody));
  }
}

void Doorman::serve() {
  while (!ending_.load()) {
    {
      const std::lock_guard lock(mutex_);
      for (const int peer : std::exchange(wanted_, {})) lobby_->call(peer);
    }
    std::vector<pollfd> also{{wake_.get(), POLLIN, 0}};
    deliver(lobby_->round(kIdle, also));
    if (also[0].revents != 0) silence(wake_);
  }
}

}  // namespace pycomm
