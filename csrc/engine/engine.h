// Runs plans and messages over links, on the host, on the caller's thread.
//
// One thread at a time; group/ ensures that. A failure has one of two effects. A mismatch starts a
// new epoch: all ranks drop the calls of the old one and continue. Every other failure breaks the
// engine: it sends its peers the reason, closes the connections, and reports the first cause from
// then on.
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

// Moves bytes over the links until it is done.
class Task {
 public:
  virtual ~Task() = default;
  // Makes the progress that is possible without waiting; true if it moved bytes.
  virtual bool advance() = 0;
  virtual bool done() const = 0;
  // The peer that it waits for, or kNoRank.
  virtual int sending_to() const = 0;
  virtual int receiving_from() const = 0;
  // A lower bound of the bytes that it still expects from that peer.
  virtual size_t receiving_bytes() const { return 0; }
  // Around a sleep, for tasks that another thread or process wakes: poll once more between arm()
  // and the sleep, as with channels.
  virtual void arm() {}
  virtual void disarm() {}
};

// The source of a receive that takes a message from any peer.
inline constexpr int kAnyPeer = -2;

// One call: a plan over arrays. Element `i` of a strided space has the index
// (i / piece) * stride + i % piece in its array. piece = 0: the array is contiguous.
struct PlanJob {
  const Schedule* schedule = nullptr;
  Header signature{};  // of every frame of the call; the engine sets epoch and sequence
  const std::byte* input = nullptr;
  std::byte* output = nullptr;
  size_t element_bytes = 1;
  size_t piece = 0, stride = 0;  // 0: contiguous
  const Reducer* reducer = nullptr;
  int size = 1;  // ranks, which avg divides by
  // For calls whose header count differs by peer (else empty): by rank the count that is sent to
  // it, then by rank the count that must be received from it.
  std::span<const size_t> peer_counts{};
};

// A message from one rank to another, complete or being received.
struct Message {
  Header header{};       // peer is the tag, count the elements
  uint64_t arrival = 0;  // order of arrival among the messages of all peers
  std::vector<std::byte> buffer{};
  std::byte* into = nullptr;  // the array of a receive that already waits; null: `buffer`
  size_t bytes = 0, have = 0;
};

// The memory that an unreceived message uses.
inline size_t bytes_used_by(const Message& message) {
  return sizeof(Message) + (message.into == nullptr ? message.bytes : 0);
}

// A rank buffers this many bytes of unreceived messages from each peer, and one more message. Then
// it stops reading from that peer, whose sends wait.
inline constexpr size_t kMaxBufferedBytes = size_t{64} << 20;

// One of the messages of an exchange().
struct MessageRequest {
  int peer = 0;
  Header signature{};  // as for send() and receive()
  bool sends = false;
  ConstBytes out{};  // data to send
  Bytes into{};      // or buffer to receive into
};

struct EngineOptions {
  int rank = 0;
  std::vector<std::string> names;    // by rank: "rank 2 (host a, pid 77)"
  std::chrono::nanoseconds spin{0};  // minimum time that a wait spins before it sleeps
  // An awaited peer that sends nothing for this time is lost; 0: never.
  std::chrono::nanoseconds heartbeat{0};
  std::function<bool()> interrupted;
  // Opens missing channels; outlives the engine.
  PeerConnector* connector = nullptr;
  // By rank: the process id as this process sees it; 0 or an empty list: not visible.
  std::vector<int64_t> pids{};
};

// What a rank knew of a peer at most some 50 ms ago.
struct PeerStatus {
  bool connected = false;
  std::optional<std::string> left_reason{};  // why it left or was lost
  double last_seen_s = 0;                    // seconds since bytes of it arrived
  std::string current_call{};                // according to its last frame; empty: unknown
  uint64_t bytes_written = 0, bytes_received = 0;
};

struct EngineStatus {
  std::string current_call{};       // this rank's last call; empty: none yet
  std::string broken{};             // the first cause; empty: not broken
  std::vector<PeerStatus> peers{};  // by rank
};

// Sums over all links since the start. `waited` is the time in which calls made no progress,
// without waits of a few microseconds, during which no clock is read.
struct EngineTraffic {
  uint64_t frames_sent = 0, payload_sent = 0, bytes_written = 0, bytes_received = 0;
  std::chrono::nanoseconds waited{0};
};

class Engine {
 public:
  // `channels` by rank; null for this rank and, with a connector, for peers that are not connected
  // yet.
  Engine(std::vector<std::unique_ptr<Channel>> channels, EngineOptions options);
  ~Engine();

  void run(const PlanJob& job, const Deadline& deadline);
  // The same for any task; `header` is next_header() of its signature.
  void run(Task& task, const Header& header, const Deadline& deadline);
  Header next_header(Header signature) const;
  void send(int to, const Header& signature, ConstBytes bytes, const Deadline& deadline);
  // `from` may be kAnyPeer. Returns the sender. Throws Mismatch, and drops the message, if its
  // dtype or count differs.
  int receive(int from, const Header& signature, Bytes into, const Deadline& deadline);
  // All concurrently; messages of one peer in order. No receive may name kAnyPeer. Throws Mismatch
  // as receive() does, after all other messages are complete.
  void exchange(std::span<const MessageRequest> messages, const Deadline& deadline);
  // Replaces send() for an array on a device: sends no payload and returns when the receiver, whose
  // receive() has no bytes either, accepted the message. Throws Mismatch, as receive() does there,
  // if the receiver expects a different message, and if both ranks announce at the same time, which
  // would be a deadlock.
  void announce_send(int to, const Header& signature, const Deadline& deadline);

  // Sends a goodbye message and closes the connections. Data already sent is still delivered.
  void leave() noexcept;
  // Sends the peers the reason and closes the connections; later calls throw GroupBroken with it.
  void fail(const Error& error) noexcept;
  // `peer` closed its connection: throws the error in its goodbye message, which may follow frames
  // that no call will read any more.
  [[noreturn]] void throw_peer_error(int peer);
  // From any thread: ends the current wait with GroupBroken.
  void stop(const std::string& reason) noexcept;
  // From any thread, at least every heartbeat_interval(): sends heartbeats on idle links and reads
  // received ones. During a call the call itself does this, at its end at the latest. False once
  // the engine is broken.
  bool heartbeat() noexcept;
  std::chrono::nanoseconds heartbeat_interval() const { return options_.heartbeat / 5; }
  // From any thread, also during a call.
  EngineStatus status() const;
  // From any thread: the ranks that are known to be lost, once the engine is broken.
  std::vector<int> lost() const;
  // Throws GroupBroken if the engine is broken or has left.
  void check_usable();
  // Call between collectives while waiting outside the engine. Throws if any peer aborted the
  // group, or if one of `awaited` failed. `limit`: timeout of that wait. While a call runs in
  // another thread, that call checks.
  void check_for_failures(std::chrono::nanoseconds limit, const std::vector<int>& awaited);

  // For the thread whose turn it is.
  EngineTraffic traffic() const;

  // For tasks. The link to `peer` if the frame at its front belongs to the current run, else null.
  // Handles the frames in front of it that belong to no run.
  Link* incoming(int peer);
  // Begins a frame, whose payload must stay valid until frame_over(). False while unsent notices
  // precede it. push() sends what fits now and returns the payload bytes sent.
  bool open(int peer, const Header& header, ConstBytes payload, bool more = false);
  size_t push(int peer);
  bool frame_over(int peer) { return at(peer).link->idle(); }
  // The oldest message from `from` that matches `wanted`, once it is complete. For kAnyPeer: of the
  // oldest messages of all peers that are complete, the one that began to arrive first; `from`
  // becomes its sender.
  std::optional<Message> take_message(int& from, const Header& wanted);
  // Throws Mismatch if no message for `wanted` can arrive, because unreceived messages before it
  // fill kMaxBufferedBytes.
  void check_arrives(int from, const Header& wanted);
  // For exchange(): copies each complete awaited message to its buffer. True if there was one.
  bool take_awaited_messages();
  // The peer whose message is awaited first, or kNoRank.
  int awaited_peer() const { return awaited_.empty() ? kNoRank : awaited_.front().from; }
  // exchange() has nothing left to send: from now on a notice may end it.
  void sent_all() { sending_ = false; }
  // The current call of `peer` is a different one: ends it on every rank with Mismatch.
  [[noreturn]] void throw_mismatch(int peer, const Header& theirs);
  // The same if the peer continued with the call `theirs`, or this rank already completed it.
  [[noreturn]] void throw_mismatch_on_end(int peer, const Header& theirs);
  // The same if both make the same call but made different calls before it.
  [[noreturn]] void throw_mismatch_on_past(int peer);
  // The same for a call of this epoch that some ranks completed, with `text` as the error text.
  [[noreturn]] void abort_call(int peer, uint32_t sequence, const std::string& text);
  // Throws PeerLost, which blames `peer`, unless what it sent is valid.
  void require_valid(int peer, bool valid, std::string_view what) const;
  // Wakes `peer`, which shares memory with this rank, if it sleeps.
  void wake_peer(int peer) { at(peer).link->channel().wake_peer(); }
  Bytes scratch(size_t bytes);
  int rank() const { return options_.rank; }

 private:
  // The frame at the front of a link: none, one of the current run, or one for a later call.
  enum class Front { nothing, ours, later };
  struct PeerState {
    std::unique_ptr<Link> link;              // null: this rank, or not connected yet
    bool requested = false;                  // a connection was requested from the connector
    std::optional<std::string> left_reason;  // "has left the group: ...", "cannot be reached: ..."
    bool left_cleanly = false;               // it left without an error
    std::deque<Message> messages;            // complete, or (the last) being received
    size_t buffered_bytes = 0;               // the sum of their bytes_used_by()
    Front front = Front::nothing;            // at the last poll
    uint64_t bytes_received_seen = 0;        // bytes received at the last poll
    Clock::time_point last_received_at{};    // when that number last grew
    uint64_t bytes_sent_seen = 0;            // bytes written at the last poll
    Clock::time_point sent_at{};             // when that number last grew
    std::optional<Header> last{};            // the last header of a call or a heartbeat
    Process process{};                       // if it is visible from this process
    Clock::time_point last_byte_at{};        // after its process ended: when bytes last arrived
    bool ended = false;                      // its process ended, and no more bytes will arrive
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
  bool send_heartbeats_locked() noexcept;  // heartbeat() with turn_ held
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
  // It closed its connection, or its process ended and everything that it sent has arrived.
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
  std::string name(int peer) const { return options_.names[static_cast<size_t>(peer)]; }

  EngineOptions options_;
  // Held by the thread that uses the links: a call, except while it calls `interrupted`, or
  // heartbeat().
  mutable std::mutex turn_;
  std::vector<PeerState> peers_;
  std::vector<pollfd> polled_;
  // polled_ holds wake_, the connector, the processes of watched_, and the channels of armed_.
  std::vector<Channel*> armed_;
  std::vector<int> watched_;
  bool process_ended_ = false;  // a process ended, and its last bytes may still arrive
  Clock::time_point interrupt_checked_at_{};  // when options_.interrupted was last called
  std::vector<std::byte> scratch_;
  std::chrono::nanoseconds spin_limit_{0};  // how long the next wait spins
  uint16_t epoch_ = 0;
  uint32_t sequence_ = 0;
  uint64_t past_ = 0;                          // hash of this epoch's calls, sent in their frames
  Header before_{};                            // the last of these calls
  uint64_t arrivals_ = 0;                      // number of messages that began to arrive
  const Header* running_ = nullptr;            // the current run, if any
  std::span<const size_t> peer_counts_;        // of its job
  Header last_{.kind = FrameKind::heartbeat};  // the last call, as heartbeats report it
  Clock::time_point updated_at_{};             // when update_last_received() was last called
  struct Awaited {
    int from;
    Header signature;
    Bytes into;
  };
  std::vector<Awaited> awaited_;  // messages that receives wait for; in order for each peer
  bool sending_ = false;          // exchange() still has messages to send
  std::vector<Refused> refused_;  // messages of exchange() that did not match their receives
  uint64_t payload_sent_ = 0;
  std::chrono::nanoseconds waited_{0};
  // The mismatch that ended the last epoch, for peers that connect later.
  Header last_mismatch_{};
  std::string last_mismatch_text_;  // empty: there was none

  std::atomic<bool> stopped_{false};
  std::atomic<bool> heartbeat_due_{false};  // heartbeat() was called during a call
  Fd wake_;                                 // written by stop()
  mutable std::mutex mutex_;                // guards the members below
  std::string stop_reason_;
  std::string broken_;  // the first cause
  std::vector<int> lost_;
  std::string current_call_;  // this and peer_statuses_: as of published_
  std::vector<PeerStatus> peer_statuses_;
  Clock::time_point published_{};
};

// Whether two headers describe the same call.
bool same_call(const Header& a, const Header& b);

// The order of a frame's call relative to this one: -1 earlier, 0 the same, 1 later. Both counters
// may wrap around.
int order(const Header& frame, uint16_t epoch, uint32_t sequence);

// The call that a header describes: "all_reduce(float32, count 10, sum, ring)".
std::string describe(const Header& header);

// Whether a frame belongs to a message. Whether a message announces or answers one between devices,
// without a payload. Whether it is the receiver's answer to such an announcement.
bool is_message(const Header& header);
bool is_agreement(const Header& message);
bool is_answer(const Header& message);

}  // namespace pycomm
