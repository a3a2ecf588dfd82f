#include "engine/link_poller.h"

namespace pycomm::engine {

bool LinkPoller::poll() {
  bool moved = connections_.accept();
  for (int peer = 0; peer < peers_.size(); ++peer) {
    if (!peers_.at(peer).link) continue;
    Link& link = *peers_.at(peer).link;
    const bool unsent = !link.idle();
    (void)link.flush();
    moved |= unsent && link.idle();
    dispatcher_.poll(peer);
    moved |= liveness_.note_bytes(peer);
  }
  return moved;
}

std::optional<int> LinkPoller::sleep(Task& task, const pollfd& stop,
                                     std::chrono::nanoseconds limit) {
  ProcessWatch& processes = peers_.processes();
  polled_.assign({stop, {task.wake_descriptor(), POLLIN, 0}});  // poll() ignores -1
  connections_.add_to(polled_);
  const size_t first_process = polled_.size();
  processes.clear();
  for (int peer = 0; peer < peers_.size(); ++peer)
    if (!peers_.at(peer).left_reason) processes.add(peer, polled_);
  arm(task);
  struct Disarm {
    LinkPoller& poller;
    Task& task;
    ~Disarm() {
      task.disarm();
      poller.disarm();
    }
  };
  int woken = 1;
  {
    const Disarm disarm{*this, task};
    task.arm();
    if (task.advance()) return std::nullopt;
    if (!poll())
      woken = ::poll(polled_.data(), polled_.size(),
                     static_cast<int>(std::chrono::ceil<std::chrono::milliseconds>(limit).count()));
  }
  if (woken > 0) processes.find_ended(std::span(polled_).subspan(first_process));
  if (processes.pending()) processes.update();
  return woken;
}

void LinkPoller::arm(const Task& task) {
  armed_.clear();
  for (int peer = 0; peer < peers_.size(); ++peer) {
    Link* const link = peers_.at(peer).link.get();
    if (link == nullptr || link->channel().is_closed()) continue;
    armed_.push_back(&link->channel());
    const bool awaited = task.receiving_from() == peer;
    polled_.push_back(armed_.back()->arm({.receive = !dispatcher_.must_wait(peer, awaited),
                                          .send = !link->idle(),
                                          .bytes = awaited ? task.receiving_bytes() : 1}));
  }
}

void LinkPoller::disarm() {
  for (size_t i = 0; i < armed_.size(); ++i)
    armed_[i]->disarm(polled_[polled_.size() - armed_.size() + i].revents);
}

}  // namespace pycomm::engine
