// A group of ranks that call collectives together: the interface that bindings use. Collectives is
// what groups for arrays in host memory and on devices have in common.
//
// Every rank makes the same calls in the same order. One thread at a time may call: a second thread
// gets InvalidArgument while a call runs (split the group instead). With
// GroupInfo::thread_multiple, collectives of several threads run one after another, first come,
// first served, and messages run beside them. Calls made with run() execute
// on the caller's thread. Those made with start() execute in order on one worker thread, and run()
// waits until they are complete.
//
// This header names no transport, socket or algorithm implementation, so a separately compiled
// module (bindings/c10d.cpp) can use a group of another module without linking it.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/dtype.h"
#include "core/errors.h"
#include "core/member.h"
#include "core/message_progress.h"
#include "core/operation.h"
#include "core/reduce_op.h"
#include "core/status.h"

namespace pycomm::rendezvous {
class Store;  // rendezvous/store.h
}  // namespace pycomm::rendezvous
namespace pycomm::device {
class Event;  // device/device.h
}  // namespace pycomm::device

namespace pycomm::group {

struct ConnectOptions;  // group/connect_options.h

// recv: any rank that sent a message with the tag.
inline constexpr int kAnySource = -1;
// The tag of messages that a group sends for itself. Programs do not use it.
inline constexpr uint32_t kInternalTag = 0xffffffff;

// The part of a call that only arrays on devices have.
struct OnDevice {
  // The caller's stream. The call begins after the work enqueued there, and later work on it begins
  // after the call.
  void* stream = nullptr;
  // start(): a further stream whose later work begins after the call. In effect before `then` runs.
  void* follower = nullptr;
  // Sends no data: returns when all ranks (for a message, the peer) have made this very call.
  bool agreement = false;
};

// One call. `count` is a number of elements: of the array (all_reduce, reduce, broadcast, send,
// recv); of the input (all_gather, gather: the output has size() times as many); of the output
// (reduce_scatter, scatter: the input has size() times as many); or of what one rank sends to
// another (all_to_all: both arrays have size() times as many).
//
// Arrays are contiguous and stay alive until the call is complete. `input` may equal `output` or,
// in all_gather, gather, reduce_scatter and scatter, this rank's block of the larger array. In
// all_to_all they must not overlap. Broadcast and recv use `output` only, send `input` only,
// barrier neither. Reduce and gather write `output` on the root only; scatter reads `input` on the
// root only.
struct Call {
  Operation operation = Operation::barrier;
  Dtype dtype = Dtype::uint8;
  ReduceOp op = ReduceOp::sum;
  const void* input = nullptr;
  void* output = nullptr;
  size_t count = 0;
  int peer = 0;  // root of broadcast, reduce, gather, scatter; peer of send, recv
  // send, recv: as of the message. all_reduce, all_gather, all_to_all: what the array is, the same
  // on all ranks: the number of a pass and a hash of parameters, 16 bits each; 0: not known.
  uint32_t tag = 0;
  Algorithm algorithm = Algorithm::automatic;
  std::chrono::nanoseconds timeout{0};  // 0: the group's
  // Empty, or element counts; `count` is then 0. all_gather: the input of each rank, the same list
  // on all ranks. all_to_all: elements sent to each rank, then elements received from each. The
  // blocks are contiguous, in rank order.
  std::vector<size_t> counts{};
  // all_to_all with counts: the caller guarantees, on all ranks alike, that every rank sends what
  // the receiver expects, for example because the ranks exchanged their counts. Otherwise the call
  // gathers the counts of all ranks first, so that all raise Mismatch if two differ.
  bool counts_fit = false;
  int* source = nullptr;  // recv: receives the sender's rank; may be null
  OnDevice device{};
};

class Work {
 public:
  virtual ~Work() = default;
  virtual bool done() const = 0;
  // As done(), but a receive that no thread waits for yet does not begin.
  virtual bool ended() const { return done(); }
  // Waits until the call is complete and throws its error if it failed. Throws Timeout after
  // `limit`; the call itself continues. A limit of 0 waits as long as the call may take.
  virtual void wait(std::chrono::nanoseconds limit = std::chrono::nanoseconds{0}) = 0;
  // Waits on this thread for a receive that no other thread waits for yet. It may return before the
  // call is complete.
  virtual void advance() {}
  // The error of a completed call, or null. Device group: also an error that occurred after the
  // call was enqueued, which wait() throws from then on.
  virtual std::exception_ptr error() const = 0;
  // Device group, where wait() returns once the call is enqueued: work put on `stream` from now on
  // begins after the call. Call it after wait().
  virtual void make_stream_wait(void* /*stream*/) {}
  // Whether the call was captured into a graph, so that no event marks its end.
  virtual bool captured() const { return false; }
};

// What this rank did since the group formed. `bytes_sent` is payload passed to transports;
// `bytes_written` adds the frame headers.
struct Stats {
  uint64_t calls = 0;
  uint64_t frames_sent = 0;
  uint64_t bytes_sent = 0;
  uint64_t bytes_written = 0;
  uint64_t bytes_received = 0;
  double seconds = 0;  // inside calls
  // Device group: the default algorithm, nccl, or host_staged if ranks share a GPU. Else automatic:
  // chosen for each call.
  Algorithm algorithm = Algorithm::automatic;
};

// What does not change while a group exists.
struct GroupInfo {
  int rank = 0, size = 1;
  std::string name;
  std::vector<Member> members;  // by rank
  std::vector<int> ranks;       // by rank: its rank in the world group
  std::vector<int> hosts;       // by rank: its host, from 0 in order of the hosts' lowest ranks
  int local_rank = 0;           // index among the ranks of this host
  int local_size = 1, host_count = 1;
  bool encrypted = false;        // whether traffic between hosts is
  bool reproducible = false;     // sums in rank order for every size
  bool thread_multiple = false;  // several threads may call at once
};

class Collectives {
 public:
  virtual ~Collectives() = default;

  virtual const GroupInfo& info() const = 0;
  int rank() const { return info().rank; }
  int size() const { return info().size; }

  // Throws InvalidArgument and Unsupported before any data is sent.
  virtual void run(const Call& call) = 0;
  // `then` runs once, when the call is complete, with its error or null: on the worker, or on a
  // thread that starts a small send or waits for a small receive. It must not throw.
  virtual std::shared_ptr<Work> start(const Call& call,
                                      std::function<void(std::exception_ptr)> then = {}) = 0;
  // Device group: starts several messages, each a send or a recv with an explicit source, as one
  // call of which both ends agree about each message. They are concurrent. `calls` are in an order
  // in which single calls would not deadlock; peers may list their messages in another order, or
  // make single calls. A message that its peer refuses is not sent: the others are, and the call
  // fails with Mismatch. Any other error breaks the group. The timeout is that of the first call.
  virtual std::shared_ptr<Work> start_messages(
      std::span<const Call> /*calls*/, const std::function<void(std::exception_ptr)>& /*then*/) {
    throw Unsupported("several messages as one call need a group for arrays on devices");
  }
  virtual Stats stats() const = 0;
  // Any thread: whether later calls throw GroupBroken, or first the error that broke the group.
  // True before a failed call on a device reports that error.
  virtual bool broken() const = 0;
  // Device group: connects the ranks, before their first collective call, which does it otherwise.
  // Collective; no effect if done. Throws as make_device_group() says.
  virtual void form(std::chrono::nanoseconds /*limit*/) {}
  virtual bool formed() const { return true; }
  // Device group: an event for streams of its device, to be recorded. Otherwise null.
  virtual std::shared_ptr<device::Event> make_event() { return nullptr; }
  // Device group: a stream of its device that no other holder uses meanwhile. Otherwise null.
  virtual std::shared_ptr<void> take_stream() { return nullptr; }

  // Leaves cleanly: peers that need nothing more from this rank are not affected. A second call has
  // no effect. Later calls raise GroupBroken.
  void close() noexcept { close_after_peers({}); }
  // The same, but closes the connections of a host group when all peers have left or died, or after
  // `wait`, or once the caller is interrupted. Peers learn at once that this rank left. A device
  // group waits that long (0: 30 s) for the calls that it has enqueued, and then aborts them.
  virtual void close_after_peers(std::chrono::nanoseconds wait) noexcept = 0;
  // Any thread: the running call, here and on every peer, fails with an error that contains
  // `reason`, and the group is broken permanently.
  virtual void abort(const std::string& reason) noexcept = 0;
};

// How the ranks agree about a call on devices, through their group for host memory. `source`: where
// a receive stores the rank that it matched.
inline Call agreement_about(Call call, int* source) {
  call.device.agreement = true;
  call.source = source;
  return call;
}

// What Group::exchange() found about messages on devices.
struct AgreedCalls {
  std::vector<Call> agreed{};  // in an order that suits NCCL, which matches messages without tags
  std::optional<Error> mismatch{};
};

// For arrays in host memory. Its destructor sends goodbye first, as close() does.
class Group : public Collectives {
 public:
  // Several messages in parallel, as one call: each of `calls` is a send or a recv with an explicit
  // source; those of one peer stay in order. The timeout is that of the first call. Throws as run()
  // does. If a message does not fit its recv, it is dropped and the others complete.
  //
  // Of messages on devices (Call::device.agreement) no data is sent: it returns when each message
  // was accepted or refused by both ends. For each peer and direction, both have the same order of
  // accepted messages. A Mismatch is returned, and the accepted messages must be sent nevertheless.
  // Other errors break the group.
  //
  // `progress`: null if the data of all sends is complete, and no other thread reads received data.
  virtual AgreedCalls exchange(std::span<const Call> calls, MessageProgress* progress) = 0;
  AgreedCalls exchange(std::span<const Call> calls) { return exchange(calls, nullptr); }

  // Runs `body`, whose calls run one after another without other calls of this rank between them.
  // Throws Timeout if earlier calls are not complete within `limit`.
  virtual void run_together(const std::function<void()>& body, std::chrono::nanoseconds limit) = 0;
  // The same on the worker, as start().
  virtual std::shared_ptr<Work> start_together(std::function<void()> body,
                                               std::function<void(std::exception_ptr)> then) = 0;

  // Collective. Ranks with the same color form a group, ordered by (key, rank). A rank with a
  // negative color takes part and gets null.
  virtual std::shared_ptr<Group> split(int color, int key) = 0;

  // Collective over this rank and `peer`, once for each peer: the group of the two, in their order.
  virtual std::shared_ptr<Group> pair_with(int peer) = 0;

  // Collective over some ranks of this group, and over processes that join them by connect():
  // returns their group, named `name`, formed through `store`. `rank`: this process's rank in it;
  // `ranks`: its ranks(). This group may be broken. Throws as connect() does.
  virtual std::shared_ptr<Group> regroup(rendezvous::Store& store, const std::string& name,
                                         int rank, std::vector<int> ranks,
                                         std::chrono::nanoseconds timeout) = 0;

  // Collective over some ranks of this group: returns their group, formed through `store`, which
  // has a key derived from this group's. For groups of one store whose ranks all have this group;
  // it may be broken. Throws as connect() does.
  virtual std::shared_ptr<Group> connect_part(rendezvous::Store& store, ConnectOptions options) = 0;

  // Memory with arbitrary contents for arrays of this group's calls, which sum it in place
  // (zero-copy). Null if the ranks do not share memory. Throws InvalidArgument if `bytes` exceeds
  // the machine's memory.
  virtual std::shared_ptr<std::byte> allocate(size_t bytes) = 0;

  virtual void set_timeout(std::chrono::nanoseconds timeout) = 0;
  // Any thread, also during a call. At most a fifth of the heartbeat limit old.
  virtual Status status() const = 0;

  // Between calls: throws the error of a peer that aborted the group, or that a peer died. Waits up
  // to `limit` for either.
  virtual void check_for_failures(std::chrono::nanoseconds limit) = 0;
};

}  // namespace pycomm::group
