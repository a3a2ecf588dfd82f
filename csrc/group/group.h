// A group of ranks that call collectives together: the one interface that bindings see.
//
// Every rank makes the same calls in the same order. A group belongs to one thread at a time: a
// second thread that enters while a call runs gets InvalidArgument (split the group instead). Calls
// made with run() happen on the caller's thread; those made with start() happen in order on one
// worker, and a run() waits for its turn behind them.
//
// This header names no transport, no socket and no algorithm's code, so that a module compiled
// apart (bindings/c10d.cpp) can use a group that another module made without linking anything of
// ours.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/dtype.h"
#include "core/errors.h"
#include "core/operation.h"
#include "core/reduce_op.h"

namespace pycomm {

class Store;  // rendezvous/store.h

// recv: whoever has sent something with the tag.
inline constexpr int kAnySource = -1;

// One call. `count` is elements of: the array (all_reduce, reduce, broadcast, send, recv), the
// input (all_gather, gather: the output is size() times that), the output (reduce_scatter, scatter:
// the input is size() times that), what one rank sends another (all_to_all: both are size() times
// that). Arrays are contiguous and stay alive until the call is over. `input` may be the same
// address as `output`, or, in all_gather, gather, reduce_scatter and scatter, as this rank's place
// in the larger one; in all_to_all they share nothing. Broadcast and recv use `output` only, send
// `input` only, barrier neither; reduce and gather write `output` on the root alone, where scatter
// alone reads `input`.
struct Call {
  Operation operation = Operation::barrier;
  Dtype dtype = Dtype::uint8;
  ReduceOp op = ReduceOp::sum;
  const void* input = nullptr;
  void* output = nullptr;
  size_t count = 0;
  int peer = 0;      // root of broadcast, reduce, gather, scatter; to whom of send, whence of recv
  uint32_t tag = 0;  // send, recv
  Algorithm algorithm = Algorithm::automatic;
  std::chrono::nanoseconds timeout{0};  // 0: the group's
  // Empty, or: all_gather: elements that each rank gives, the same list on all ranks; all_to_all:
  // elements that go to each rank, and behind them those that come from each. They lie after one
  // another in rank order, and `count` is then 0.
  std::vector<size_t> counts{};
  // all_to_all with counts, on all ranks alike: the caller knows that what each rank sends is what
  // its receiver expects, as where the ranks have just told each other their counts. Else the call
  // gathers the counts of all ranks first, so that all get Mismatch where two differ.
  bool counts_fit = false;
  int* source = nullptr;  // recv: told from whom, if not null
  // Of a group on devices: the caller's stream there, behind whose work the call begins and whose
  // later work begins behind the call.
  void* stream = nullptr;
  // The same, of start(): one more stream whose later work begins behind the call. It is so before
  // `then` runs.
  void* follower = nullptr;
  // Nothing moves: returns when all ranks, of a message the other one, have come to this very call,
  // whose arrays lie on devices.
  bool agreement = false;
};

class Work {
 public:
  virtual ~Work() = default;
  virtual bool done() const = 0;
  // Waits until the call is over and throws its error if it failed. Throws Timeout when `limit`
  // passes first; the call itself goes on. A limit of 0 waits as long as the call may take.
  virtual void wait(std::chrono::nanoseconds limit = std::chrono::nanoseconds{0}) = 0;
  // The error of a call that is over, or null. Of a group on devices also one that came after it
  // was enqueued, which wait() throws from then on.
  virtual std::exception_ptr error() const = 0;
  // Of a group on devices, where wait() returns as soon as the call is enqueued: what is put on
  // `stream` from now on begins behind it. After wait().
  virtual void make_stream_wait(void* /*stream*/) {}
  // It went into a graph that was being captured: no moment of the device's is its end.
  virtual bool captured() const { return false; }
};

// What this rank has done since the group stands. `bytes_sent` is payload handed to transports;
// `bytes_written` adds the frame headers: what peers were really sent.
struct Stats {
  uint64_t calls = 0;
  uint64_t frames_sent = 0;
  uint64_t bytes_sent = 0;
  uint64_t bytes_written = 0;
  uint64_t bytes_received = 0;
  double seconds = 0;  // inside calls
  // Of a group on devices, by which calls go that name none: nccl, or staged where ranks share a
  // GPU. Else automatic: it is chosen for each call.
  Algorithm algorithm = Algorithm::automatic;
};

// What this rank knows at the moment, without asking anybody.
struct Status {
  struct Peer {
    bool connected = false;
    std::string departed;  // why it left, if it did
    double silent_s = 0;   // since it was heard of
    std::string doing;     // as its last frame said; empty: it has said nothing
    uint64_t bytes_written = 0, bytes_received = 0;
  };
  std::string doing;   // this rank's last call; empty before the first
  std::string broken;  // why the group can be used no more, from when on peers stay as they are
  std::vector<Peer> peers;  // by rank; nothing of oneself
};

// Who a rank is, as it said when the group formed.
struct Member {
  std::string host;
  int64_t pid = 0;
  std::string transport;  // what this rank reaches it by: "self", "local", "shm", "tcp"
  bool visible = false;   // its process id means the same process here
  // When its process began, in clock ticks since the machine did (field 22 of /proc/PID/stat): with
  // the process id it names one process for good. 0: unknown.
  int64_t started = 0;
};

class Group {
 public:
  virtual ~Group() = default;  // says goodbye first, as close() does

  virtual int rank() const = 0;
  virtual int size() const = 0;
  virtual const std::string& name() const = 0;
  virtual const std::vector<Member>& members() const = 0;  // by rank
  virtual const std::vector<int>& ranks() const = 0;       // by rank: its rank in the first group
  virtual int local_rank() const = 0;                      // among the ranks of this host, by rank
  virtual int local_size() const = 0;
  virtual int host_count() const = 0;
  // By rank: which host, numbered from 0 in order of their first ranks.
  virtual const std::vector<int>& hosts() const = 0;
  virtual bool encrypted() const = 0;     // what leaves a host is
  virtual bool reproducible() const = 0;  // sums in rank order, whatever the size

  // InvalidArgument and Unsupported are thrown before anything moves.
  virtual void run(const Call& call) = 0;
  // `then` runs once on the worker when the call is over, with its error or null; it must not
  // throw.
  virtual std::shared_ptr<Work> start(const Call& call,
                                      std::function<void(std::exception_ptr)> then = {}) = 0;

  // Messages that travel at once, as one call: each of `calls` is a send or a recv from one rank;
  // those of one peer are in order. Their limit is that of the first. Throws as run() does; where a
  // message is not what a recv wants, that one is dropped and the others are carried out.
  virtual void exchange(std::span<const Call> calls) = 0;

  // Collective. Ranks that give the same color form a group, ordered by (key, rank); a negative
  // color takes part and gets null.
  virtual std::shared_ptr<Group> split(int color, int key) = 0;

  // Of a group that is broken: ranks that will not come back, as far as this one knew when it
  // broke. They died, were silent for too long, or left cleanly.
  virtual std::vector<int> lost() const = 0;
  // Collective over `members`, ranks of this group in the order that they will have: the group of
  // them, called `name`, who meet in `store`. This one may be broken. Throws as connect() does.
  virtual std::shared_ptr<Group> regroup(Store& store, const std::string& name,
                                         const std::vector<int>& members,
                                         std::chrono::nanoseconds timeout) = 0;

  // `bytes` for arrays of calls of this group, in which they are then summed where they lie, with
  // arbitrary contents. Null where its ranks do not see each other's memory. Throws InvalidArgument
  // for more than the machine has.
  virtual std::shared_ptr<std::byte> allocate(size_t bytes) = 0;

  virtual Stats stats() const = 0;
  virtual void set_timeout(std::chrono::nanoseconds timeout) = 0;
  // From any thread, also while a call waits; up to a fifth of the heartbeat limit old.
  virtual Status status() const = 0;

  // Leaves cleanly: peers that need nothing more from this rank do not notice. A second call has no
  // effect. Later calls raise GroupBroken.
  virtual void close() noexcept = 0;
  // Between calls: throws what a peer has reported that ends the group, and that a peer has died;
  // waits for either for as long as the limit.
  virtual void hear(std::chrono::nanoseconds limit) = 0;
  // From any thread: the call that runs, here and on every peer, ends with an error that carries
  // `reason`, and the group is broken for good.
  virtual void abort(const std::string& reason) noexcept = 0;
};

}  // namespace pycomm
