// Messages that arrived from each peer, until a receive takes them, and the receives that wait.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <functional>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "collectives/plan.h"
#include "core/errors.h"
#include "engine/call_sequence.h"
#include "engine/peer_table.h"

namespace pycomm::engine {

class Task;

// The source of a receive that takes a message from any peer.
inline constexpr int kAnyPeer = -2;

// A rank buffers this many bytes of unreceived messages from each peer, and one more message. Then
// it stops reading from that peer, whose sends wait.
inline constexpr size_t kMaxBufferedBytes = size_t{64} << 20;

// A message from one rank to another, complete or being received.
struct Message {
  transport::Header header{};  // peer is the tag, count the elements
  uint64_t arrival = 0;        // order of arrival among the messages of all peers
  std::vector<std::byte> buffer{};
  std::byte* into = nullptr;  // the array of a receive that already waits; null: `buffer`
  size_t bytes = 0, have = 0;
};

// A receive that waits for a message.
struct Awaited {
  int from = kAnyPeer;
  transport::Header signature{};
  transport::Bytes into{};
  size_t index = 0;  // in the list of messages of an exchange
  const Task* owner = nullptr;
};

class Mailbox {
 public:
  Mailbox(PeerTable& peers, const CallSequence& calls)
      : peers_(peers), calls_(calls), inboxes_(static_cast<size_t>(peers.size())) {}

  // The receives that wait for their turn, in order, while another task runs. The start of a large
  // message that no task awaits calls it. Each keeps its memory until it took its message or
  // detach() was called.
  void set_waiting(std::function<std::vector<Awaited>()> waiting) { waiting_ = std::move(waiting); }
  // The rest of a message that arrives in this memory goes to a buffer.
  void detach(const std::byte* into);
  // Receives of a task: in order for each peer. While a task sends, notices end none of them.
  void await(const Task* owner, const Awaited& receive) {
    awaited_.push_back(receive);
    awaited_.back().owner = owner;
  }
  void set_sending(const Task* task, bool sending) {
    std::erase(sending_, task);
    if (sending) sending_.push_back(task);
  }
  bool awaits() const { return !awaited_.empty(); }
  bool only_awaits() const { return awaits() && sending_.empty(); }
  // The peer whose message the task awaits first, or kNoRank.
  int awaited_peer(const Task* owner) const {
    const auto found = std::ranges::find(awaited_, owner, &Awaited::owner);
    return found == awaited_.end() ? collectives::kNoRank : found->from;
  }
  // The peers that have yet to accept a message that this rank announced to them.
  std::vector<int> announced_to() const;
  // No receive of the task waits any more, and it sends nothing. `keep`: those whose messages are
  // arriving continue in a later call, with the same memory.
  void end_receives(const Task* owner, bool keep);
  // Whether it may have an effect.
  bool is_used() const { return !awaited_.empty() || !sending_.empty(); }

  // Whether the message at the front of a link may be read.
  bool has_space(int peer, const transport::Header& header) const;
  // Reads it as far as it arrived.
  void read(int peer, const transport::Header& header);
  // The oldest message from receive.from that matches its signature, if it is complete. For
  // kAnyPeer: of the oldest messages of all peers that are complete, the one that began to arrive
  // first; `from` becomes its sender. It is in the receive's memory or in its own buffer.
  std::optional<Message> take(Awaited& receive);
  // Passes the messages that take_message(receive) returns to `receive`, with the receives of the
  // task that wait for them. True if there was one.
  template <typename Take, typename Receive>
  bool deliver_awaited(const Task* owner, const Take& take_message, const Receive& receive) {
    bool took = false;
    for (auto one = awaited_.begin(); one != awaited_.end();) {
      const auto same = [&](const Awaited& other) { return is_for_same_messages(other, *one); };
      const bool first = one->owner == owner && std::ranges::find_if(awaited_, same) == one;
      const auto message = first ? take_message(*one) : std::nullopt;
      if (!message) {
        ++one;
        continue;
      }
      took = true;
      receive(*one, *message);
      one = awaited_.erase(one);
    }
    return took;
  }
  // Passes the receives whose messages are arriving in their memory to `report`, with the number of
  // bytes so far.
  template <typename Report>
  void report_arriving(const Report& report) const {
    for (const Awaited& one : awaited_)
      for (const Message& message : at(one.from).messages)
        if (message.into != nullptr && message.into == one.into.data()) report(one, message.have);
  }
  // The error of a receive whose message cannot arrive, because others fill the buffer.
  Mismatch full(int from, const transport::Header& wanted) const;
  // A new epoch: drops announcements and their answers.
  void drop_agreements();

 private:
  struct Inbox {
    std::deque<Message> messages{};  // complete, or (the last) being received
    size_t buffered_bytes = 0;       // the memory that they use
  };
  Inbox& at(int peer) { return inboxes_[static_cast<size_t>(peer)]; }
  const Inbox& at(int peer) const { return inboxes_[static_cast<size_t>(peer)]; }
  bool start(int peer, const transport::Header& header);
  // Whether two receives take the same messages, so that they must do so in order.
  static bool is_for_same_messages(const Awaited& a, const Awaited& b) {
    return a.owner == b.owner && a.from == b.from &&
           a.signature.operation == b.signature.operation && a.signature.peer == b.signature.peer;
  }
  std::byte* destination_for(int peer, const transport::Header& header, size_t bytes) const;
  std::optional<std::byte*> destination_in(std::span<const Awaited> receives, int peer,
                                           const transport::Header& header) const;
  static void detach(Message& message, Inbox& inbox);

  PeerTable& peers_;
  const CallSequence& calls_;
  std::vector<Inbox> inboxes_;
  std::vector<Awaited> awaited_;
  std::function<std::vector<Awaited>()> waiting_;
  std::vector<const Task*> sending_;  // those that still have messages to send
  uint64_t arrivals_ = 0;             // number of messages that began to arrive
};

}  // namespace pycomm::engine
