#include "engine/peer_table.h"

#include <poll.h>

#include <algorithm>
#include <cstring>
#include <utility>

namespace pycomm::engine {
namespace {

// Bytes that a peer does not take within this time are left to its channel. A wait notices a signal
// within 100 ms; together these bound the time that Ctrl-C takes.
constexpr std::chrono::milliseconds kFlushTimeout{100};

// The payload of a goodbye: kind, blamed rank, text.
std::string encode(const Goodbye& goodbye) {
  const int32_t blamed = goodbye.blamed;
  std::string payload(1 + sizeof blamed, '\0');
  payload[0] = static_cast<char>(goodbye.kind);
  std::memcpy(payload.data() + 1, &blamed, sizeof blamed);
  return payload + goodbye.text;
}

}  // namespace

PeerTable::PeerTable(Identity identity, std::vector<std::unique_ptr<transport::Channel>> channels,
                     PeerConnector* connector)
    : rank_(identity.rank),
      names_(std::move(identity.names)),
      peers_(channels.size()),
      processes_(std::move(identity.pids), channels.size()),
      connector_(connector) {
  for (int peer = 0; peer < size(); ++peer)
    if (auto& channel = channels[static_cast<size_t>(peer)]) connect(peer, std::move(channel));
}

void PeerTable::connect(int peer, std::unique_ptr<transport::Channel> channel) {
  channel->wake_by(wake_event_);
  at(peer).link = std::make_unique<Link>(std::move(channel));
  processes_.watch(peer);
}

void PeerTable::request(int peer) {
  Peer& state = at(peer);
  if (state.link || state.requested || state.left_reason || connector_ == nullptr) return;
  state.requested = true;
  state.silent_since = Clock::now();
  connector_->request(peer);
}

bool PeerTable::accept() {
  if (connector_ == nullptr) return false;
  std::vector<ConnectResult> arrivals = connector_->take();
  for (ConnectResult& arrival : arrivals) {
    Peer& state = at(arrival.peer);
    if (state.link) continue;
    if (!arrival.channel) {
      state.left_reason = "cannot be reached: " + arrival.why + "; it died or left the group";
      continue;
    }
    connect(arrival.peer, std::move(arrival.channel));
    state.silent_since = Clock::now();
    if (!mismatch_.second.empty()) state.link->post(mismatch_.first, mismatch_.second);
  }
  return !arrivals.empty();
}

void PeerTable::close_connector() {
  if (connector_ != nullptr) connector_->close();
  (void)accept();
}

void PeerTable::require_any() const {
  if (connector_ == nullptr &&
      std::ranges::all_of(peers_, [](const Peer& peer) { return !peer.link || peer.left_reason; }))
    throw PeerLost("all other ranks left the group, and none sent a message before");
}

void PeerTable::notify(const transport::Header& notice, const std::string& text) {
  if (notice.kind == transport::FrameKind::mismatch) mismatch_ = {notice, text};
  for (Peer& peer : peers_) {
    if (!peer.link) continue;
    peer.link->abandon();
    peer.link->post(notice, text);
  }
  flush_all();
}

// Sends the unsent bytes of all links, for a limited time. Does not read, because peers that wait
// for this rank read.
void PeerTable::flush_all() {
  const Deadline deadline(kFlushTimeout);
  for (;;) {
    std::vector<pollfd> waiting;
    std::vector<transport::Channel*> armed;
    bool idle = true;
    for (Peer& peer : peers_) {
      if (!peer.link || peer.link->channel().is_closed() || peer.link->flush()) continue;
      waiting.push_back(peer.link->channel().arm({false, true}));
      armed.push_back(&peer.link->channel());
      idle &= !peer.link->flush();  // sent in the meantime: do not sleep
    }
    if (armed.empty()) return;
    if (idle) wake_event_.wait(waiting, std::chrono::milliseconds(10));
    for (size_t i = 0; i < armed.size(); ++i) armed[i]->disarm(waiting[i].revents);
    if (deadline.expired()) return;
  }
}

void PeerTable::say_goodbye(uint16_t epoch, const Goodbye& goodbye) {
  notify({.kind = transport::FrameKind::goodbye, .epoch = epoch}, encode(goodbye));
}

void PeerTable::receive_goodbye(int peer, const std::string& payload) {
  require_valid(peer, payload.size() >= 1 + sizeof(int32_t), "a goodbye is too short");
  const auto kind = static_cast<uint8_t>(payload[0]);
  int32_t blamed = collectives::kNoRank;
  std::memcpy(&blamed, payload.data() + 1, sizeof blamed);
  const std::string text = payload.substr(1 + sizeof blamed);
  at(peer).left_reason = "has left the group: " + text;
  at(peer).left_cleanly = kind == Goodbye::kLeftCleanly;
  if (at(peer).left_cleanly) return;
  const std::string reported = text + " (as " + name(peer) + " reports)";
  if (kind == static_cast<uint8_t>(ErrorKind::timeout)) throw Timeout(reported, {.peer = blamed});
  if (blamed == rank_)
    throw PeerLost(name(peer) + " considers this rank lost: " + text, {.peer = peer});
  if (kind == static_cast<uint8_t>(ErrorKind::peer_lost))
    throw PeerLost(reported, {.peer = blamed});
  throw GroupBroken(reported, {.peer = blamed == collectives::kNoRank ? peer : blamed});
}

void PeerTable::close_all() noexcept {
  for (Peer& peer : peers_)
    if (peer.link) peer.link->close();
}

PeerLost PeerTable::lost(int peer) const {
  const Peer& gone = at(peer);
  const auto protocol_error =
      gone.link ? gone.link->channel().protocol_error() : std::string_view{};
  if (!protocol_error.empty()) return violation(peer, protocol_error);
  const std::string unexpected =
      processes_.ended(peer) && gone.link && !gone.link->channel().is_closed()
          ? "died: its process ended without a goodbye message"
          : "died or lost its connection: the connection closed unexpectedly";
  return PeerLost(name(peer) + " " + gone.left_reason.value_or(unexpected), {.peer = peer});
}

PeerLost PeerTable::violation(int peer, std::string_view what) const {
  return PeerLost("protocol error from " + name(peer) + ": " + std::string(what), {.peer = peer});
}

}  // namespace pycomm::engine
