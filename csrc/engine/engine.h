// Runs plans and messages over links, on the host, on the caller's thread.
//
// One thread at a time; group/ sees to that. What goes wrong ends in one of two ways. A
// disagreement (Mismatch) starts a new epoch: all ranks forget the calls of the old one, and go on.
// Everything else breaks the engine: it tells its peers why, closes the connections, and repeats
// the first cause.
#pragma once

#include <atomic>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/deadline.h"
#include "core/errors.h"
#include "engine/link.h"
#include "engine/peer_connector.h"
#include "engine/schedule.h"
#include "kernels/kernels.h"
#include "os/process.h"

namespace pycomm {

// Something that moves bytes over the links until it is done.
class Task {
 public:
  virtual ~Task() = default;
  // Does what can be done now without waiting; true if anything moved.
  virtual bool advance() = 0;
  virtual bool done() const = 0;
  // Whom it waits for, or kNoRank.
  virtual int sending_to() const = 0;
  virtual int receiving_from() const = 0;
  // How much is still to come from there, at least.
  virtual size_t receiving_bytes() const { return 0; }
  // Around a sleep, for tasks that others wake: arm() comes before a last look, as with channels.
  virtual void arm() {}
  virtual void disarm() {}
};

// The source of a receive that takes a message from any peer.
inline constexpr int kAnyPeer = -2;

// A call of the user's in the engine's words: one plan over arrays. Element `i` of a space that is
// cut into pieces of `piece` elements lies at (i / piece) * stride + i % piece; without blocks both
// are the whole array.
struct PlanJob {
  const Schedule* schedule = nullptr;
  Header signature{};  // what every frame of the call says; epoch and sequence are the engine's
  const std::byte* input = nullptr;
  std::byte* output = nullptr;
  size_t element_bytes = 1;
  size_t piece = 0, stride = 0;  // 0: contiguous
  const Reducer* reducer = nullptr;
  int size = 1;  // ranks, which avg divides by
  // Empty, or, where the header's count differs from peer to peer: what it is towards each rank,
  // and behind that what it must be from each.
  std::span<const size_t> peer_counts{};
};

// A message from one rank to another, whole.
struct Message {
  Header header{};       // peer is the tag, count the elements
  uint64_t arrival = 0;  // in which order they came, from all peers
  std::vector<std::byte> buffer{};
  std::byte* into = nullptr;  // the receiver's array if it waits already; null: `buffer`
  size_t bytes = 0, have = 0;
};

// What it takes of the memory of a rank that has not received it.
inline size_t bytes_used_by(const Message& message) {
  return sizeof(Message) + (message.into == nullptr ? message.bytes : 0);
}

// Of messages that no receive has taken a rank keeps so many bytes from each peer, and one message
// more. Then it reads no further from that peer, whose sends wait.
inline constexpr size_t kMaxBufferedBytes = size_t{64} << 20;

// One of messages that travel at once.
struct MessageRequest {
  int peer = 0;
  Header signature{};  // as of send() and receive()
  bool sends = false;
  ConstBytes out{};  // what it sends
  Bytes into{};      // or where it lands
};

struct EngineOptions {
  int rank = 0;
  std::vector<std::string> names;    // by rank: "rank 2 (host a, pid 77)"
  std::chrono::nanoseconds spin{0};  // how long a wait looks at least before it sleeps
  // An awaited peer that sends nothing for so long is lost; 0: never.
  std::chrono::nanoseconds heartbeat{0};
  std::function<bool()> interrupted;
  // Makes the channels that are not there yet; outlives the engine.
  PeerConnector* connector = nullptr;
  // By rank: the process, where this one sees it by that number; 0, or an empty list: it does not.
  std::vector<int64_t> pids{};
};

// What a rank knows of a peer, as of a moment ago.
struct PeerStatus {
  bool connected = false;
  std::optional<std::string> left_reason{};  // what became of it
  double last_seen_s = 0;                    // since it was heard of
  std::string current_call{};                // as its last frame said; empty: not known
  uint64_t bytes_written = 0, bytes_received = 0;
};

class Engine {
 public:
  // `channels` by rank; null for oneself and, where there is a connector, for peers that are not
  // connected yet.
  Engine(std::vector<std::unique_ptr<Channel>> channels, EngineOptions options);
  ~Engine();

  void run(const PlanJob& job, const Deadline& deadline);
  // The same for a task of another strategy: `header` is next_header() of its signature.
  void run(Task& task, const Header& header, const Deadline& deadline);
  Header next_header(Header signature) const;
  void send(int to, const Header& signature, ConstBytes bytes, const Deadline& deadline);
  // `from` may be kAnyPeer; gives the sender. Throws Mismatch, and drops the message, if it is of
  // another dtype or count.
  int receive(int from, const Header& signature, Bytes into, const Deadline& deadline);
  // All at once; those of one peer in order. No receive is of kAnyPeer. Throws Mismatch as
  // receive() does, when all others are over.
  void exchange(std::span<const MessageRequest> messages, const Deadline& deadline);
  // In place of send() where the array lies on a device: nothing moves, and the receiver, whose
  // receive() has no bytes either, has said that it takes the message. Throws Mismatch, as
  // receive() does there, where it takes another one; and where both ranks do this at once, as each
  // would wait for the other for ever.
  void announce_send(int to, const Header& signature, const Deadline& deadline);

  // Says goodbye and closes the connections. What was sent is still delivered.
  void leave() noexcept;
  // Tells the peers why and closes the connections; later calls throw GroupBroken with this cause.
  void fail(const Error& error) noexcept;
  // `peer` closed its connection: throws what its goodbye says, which may follow frames that no
  // call will take any more.
  [[noreturn]] void throw_peer_error(int peer);
  // From any thread: ends the wait that is under way, with GroupBroken.
  void stop(const std::string& reason) noexcept;
  // From any thread, at least every heartbeat_interval(): sends heartbeats on silent links, and
  // takes theirs. While a call runs it is the call that does so, at its end at the latest. False
  // once the engine is broken.
  bool heartbeat() noexcept;
  std::chrono::nanoseconds heartbeat_interval() const { return options_.heartbeat / 5; }
  // From any thread, also while a call waits: what this rank called last, and what it knows of each
  // rank.
  std::string current_call() const;
  std::vector<PeerStatus> peer_statuses() const;
  // From any thread: who is known not to come back, once the engine is broken.
  std::vector<int> lost() const;
  std::string broken() const;  // the first cause; empty: it is not
  // Throws GroupBroken if the engine is broken or has left.
  void check_usable();
  // Call between collectives while waiting outside the engine. Throws if any peer aborted the
  // group, or if one of `awaited` failed. `limit`: timeout of that wait. While a call runs in
  // another thread, that call checks.
  void check_for_failures(std::chrono::nanoseconds limit, const std::vector<int>& awaited);

  uint64_t frames_sent() const { return sum(&Link::frames_sent); }
  uint64_t bytes_written() const { return sum(&Link::bytes_written); }
  uint64_t bytes_received() const { return sum(&Link::bytes_received); }
  uint64_t payload_sent() const { return payload_sent_; }
  // In which the calls so far could do nothing; waits of a few microseconds, in which no clock is
  // read, do not count. For whose turn it is.
  std::chrono::nanoseconds waited() const { return waited_; }

  // For tasks. The link to `peer` if the frame at its front belongs to the run under way, else
  // null; frames that belong to nothing here are dealt with on the way.
  Link* incoming(int peer);
  // Begins a frame, whose payload stays in place until frame_over(). False while notices are in the
  // way. push() sends what fits now and gives the payload bytes that went.
  bool open(int peer, const Header& header, ConstBytes payload, bool more = false);
  size_t push(int peer);
  bool frame_over(int peer) { return at(peer).link->idle(); }
  // The oldest message from `from` that `wanted` is meant for, once it is whole. For kAnyPeer: of
  // everybody's oldest, as far as they are whole, the one that began to arrive first; `from` then
  // says whose.
  std::optional<Message> take_message(int& from, const Header& wanted);
  // Throws Mismatch where no message for `wanted` can arrive: unreceived messages before it take
  // kMaxBufferedBytes.
  void check_arrives(int from, const Header& wanted);
  // Of exchange(): takes the messages that are whole and awaited, each into its place. True if
  // there was one.
  bool take_awaited_messages();
  // Whose message is awaited first, or kNoRank.
  int awaited_peer() const { return awaited_.empty() ? kNoRank : awaited_.front().from; }
  // Nothing of exchange() is left to send: only now may a notice cut it short.
  void sent_all() { sending_ = false; }
  // `peer` says that the call under way is another: ends it on every rank with Mismatch.
  [[noreturn]] void throw_mismatch(int peer, const Header& theirs);
  // The same where the peer has gone on to the call `theirs`, or this rank has ended it already.
  [[noreturn]] void throw_mismatch_on_end(int peer, const Header& theirs);
  // The same where both make the same call, and have made others before it.
  [[noreturn]] void throw_mismatch_on_past(int peer);
  // The same for a call of this epoch that is over on some ranks, with `text` as its sentence.
  [[noreturn]] void abort_call(int peer, uint32_t sequence, const std::string& text);
  // What `peer` sent makes sense: else throws PeerLost, as the fault is its own.
  void require_valid(int peer, bool sound, std::string_view what) const;
  // Wakes `peer`, which shares memory with us, if it sleeps.
  void wake_peer(int peer) { at(peer).link->channel().wake_peer(); }
  Bytes scratch(size_t bytes);
  int rank() const { return options_.rank; }

 private:
  // What is at the front of a link.
  enum class Front { nothing, ours, later };
  struct PeerState {
    std::unique_ptr<Link> link;              // null: oneself, or not met yet
    bool requested = false;                  // the connector was asked for it
    std::optional<std::string> left_reason;  // what became of it: "has left the group: ..."
    bool left_cleanly = false;               // it has left, and that is all
    std::deque<Message> messages;            // arrived, or (the last) arriving
    size_t buffered_bytes = 0;               // their bytes_used_by() together
    Front front = Front::nothing;            // what stood there when last looked at
    uint64_t bytes_received_seen = 0;        // bytes received when last looked at
    Clock::time_point last_received_at{};    // when they last grew
    uint64_t bytes_sent_seen = 0;            // bytes written when last looked at
    Clock::time_point sent_at{};             // when they last grew
    std::optional<Header> last{};            // the last header of a call or a heartbeat
    Process process{};                       // where it can be seen from here
    Clock::time_point last_byte_at{};        // once the process has ended: when bytes came last
    bool ended = false;                      // ... long enough ago that nothing more will come
  };

  void detach_partial_messages();
  void guard(Task& task, const Header& signature, const Deadline& deadline);
  void drive(Task& task, const Deadline& deadline);
  void adapt_spin_limit(Clock::time_point idle_since);
  bool worth_spinning(const Task& task) const;
  bool sleep(Task& task, const Deadline& deadline);
  void check_between_sleeps(const Task& task, const Deadline& deadline, bool moved);
  void check_abort_conditions(const Task& task, const Deadline& deadline);
  void check_peers_needed(const Task& task);
  void check_heartbeats(const Task& task);
  void send_heartbeats(Clock::time_point now);
  void update_last_received(Clock::time_point now);
  void publish(Clock::time_point now);
  std::string describe_peer(const PeerState& state) const;
  const Header* front(int peer);
  void abort(const Error& error) noexcept;
  void request_connection(int peer);
  bool accept_connections();
  bool poll_peers();
  bool must_wait(int peer, const Task& task);
  Front poll_peer(int peer);
  Front dispatch_frame(int peer, const Header& header);
  Front dispatch_data(int peer, const Header& header);
  Header expected_from(int peer) const;
  bool send_heartbeats_locked() noexcept;  // heartbeat(), by who works with the links
  void take_heartbeat(int peer, const Header& header);
  bool contradicts_run(const Header& heartbeat) const;
  bool has_announced_to_other(int peer) const;
  bool has_buffer_space(int peer, const Header& header) const;
  void buffer_message(int peer, const Header& header);
  std::optional<Message> take_buffered(int& from, const Header& wanted);
  bool only_awaits() const { return !awaited_.empty() && !sending_; }
  std::byte* destination_for(int peer, const Header& header);
  struct Refused {
    int from;
    Header theirs, mine;
  };
  [[noreturn]] void refuse(const Refused& message) const;
  Message await(int& from, const Header& wanted, Bytes into, const Header& signature,
                const Deadline& deadline);
  void read_notice(int peer, const Header& header);
  void handle_goodbye(int peer, const std::string& payload);
  void new_epoch(const Header& notice, const std::string& text);
  void post_goodbye(uint8_t kind, int peer, const std::string& text);
  void say_goodbye(uint8_t kind, int peer, const std::string& text) noexcept;
  bool has_closed(int peer);
  std::chrono::nanoseconds longest_sleep(const Deadline& deadline) const;
  void watch_process(int peer);
  void find_ended(size_t first);
  void update_ended();
  // It closed its connection, or its process has ended and all that it sent is here.
  static bool over(const PeerState& state) {
    return state.ended || state.link->channel().is_closed();
  }
  bool closed_cleanly(int peer);
  void poll_for_failures(const std::vector<int>& awaited);
  void wait_for_close(const std::vector<int>& awaited);
  PeerLost peer_lost(int peer) const;
  PeerLost protocol_violation(int peer, std::string_view what) const;
  std::vector<int> find_unresponsive_peers(const Error& error);
  bool answers(int peer, const Deadline& deadline);
  std::vector<int> find_lost(const Error& error);
  bool flush_all(std::chrono::nanoseconds limit);
  PeerState& at(int peer) { return peers_[static_cast<size_t>(peer)]; }
  uint64_t sum(uint64_t (Link::*figure)() const) const;
  std::string name(int peer) const { return options_.names[static_cast<size_t>(peer)]; }

  EngineOptions options_;
  // Held by who works with the links: a call, but for the time in which it asks `interrupted`, or
  // heartbeat().
  mutable std::mutex turn_;
  std::vector<PeerState> peers_;
  std::vector<pollfd> polled_;
  std::vector<Channel*> armed_;  // those behind polled_, which starts with wake_
  std::vector<int> watched_;     // of whom polled_ holds the processes, before those
  bool process_ended_ = false;   // a process has ended, and its last bytes may be on their way
  Clock::time_point asked_{};    // when options_.interrupted was asked last
  std::vector<std::byte> scratch_;
  std::chrono::nanoseconds spin_limit_{0};  // for how long the next wait looks
  uint16_t epoch_ = 0;
  uint32_t sequence_ = 0;
  uint64_t past_ = 0;                    // a hash of the calls of this epoch, for their frames
  Header before_{};                      // the last of them
  uint64_t arrivals_ = 0;                // messages that began to arrive
  const Header* running_ = nullptr;      // the run under way, if any
  std::span<const size_t> peer_counts_;  // its job's
  Header last_{.kind = FrameKind::heartbeat};  // what was called last, as heartbeats tell it
  Clock::time_point updated_at_{};             // when update_last_received() was called last
  struct Awaited {
    int from;
    Header signature;
    Bytes into;
  };
  std::vector<Awaited> awaited_;  // messages that receives wait for, those of one peer in order
  bool sending_ = false;          // and others are still to be sent
  std::vector<Refused> refused_;  // that exchange() has taken and that were not as awaited
  uint64_t payload_sent_ = 0;
  std::chrono::nanoseconds waited_{0};
  // The disagreement that ended the last epoch, for peers that connect later.
  Header last_mismatch_{};
  std::string last_mismatch_text_;  // it; empty: there was none

  std::atomic<bool> stopped_{false};
  std::atomic<bool> heartbeat_due_{false};  // heartbeat() came during a call
  Fd wake_;                                 // written by stop()
  mutable std::mutex mutex_;                // guards those below
  std::string stop_reason_;
  std::string broken_;  // the first cause
  std::vector<int> lost_;
  std::string current_call_;  // for current_call() and peer_statuses(), as of published_
  std::vector<PeerStatus> peer_statuses_;
  Clock::time_point published_{};
};

// Whether two headers tell of the same call.
bool same_call(const Header& a, const Header& b);

// When a frame's call is: -1 before this one, 0 it, 1 after; both counters may wrap around.
int order(const Header& frame, uint16_t epoch, uint32_t sequence);

// What a header says a call is: "all_reduce(float32, sum, count 10)".
std::string describe(const Header& header);

// Whether a frame is of a message; of a message, whether it tells of one between devices, and
// nothing follows the header; whether it is the word of who receives there.
bool is_message(const Header& header);
bool is_agreement(const Header& message);
bool is_answer(const Header& message);

}  // namespace pycomm
