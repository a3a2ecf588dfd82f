#include "engine/process_watch.h"

namespace pycomm::engine {

void ProcessWatch::watch(int peer) {
  const auto i = static_cast<size_t>(peer);
  at(peer).process = os::Process(i < pids_.size() ? pids_[i] : 0);
  if (at(peer).process.ended()) note_end(at(peer));
}

void ProcessWatch::note_end(State& state) {
  state.last_byte_at = Clock::now();
  pending_ = true;
}

void ProcessWatch::add(int peer, std::vector<pollfd>& polled) {
  const int process = at(peer).process.descriptor();
  if (process < 0) return;
  watched_.push_back(peer);
  polled.push_back({process, POLLIN, 0});
}

void ProcessWatch::find_ended(std::span<const pollfd> polled) {
  for (size_t i = 0; i < watched_.size(); ++i) {
    if (polled[i].revents == 0) continue;
    at(watched_[i]).process.found_ended();
    note_end(at(watched_[i]));
  }
}

void ProcessWatch::look(int peer) {
  State& state = at(peer);
  if (!state.process.ended() && state.process.look()) note_end(state);
}

void ProcessWatch::update() {
  const auto now = Clock::now();
  pending_ = false;
  for (State& state : states_) {
    if (!state.process.ended() || state.ended) continue;
    state.ended = now - state.last_byte_at >= kQuiet;
    pending_ |= !state.ended;
  }
}

}  // namespace pycomm::engine
