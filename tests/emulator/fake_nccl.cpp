#include "fake_nccl.hpp"

#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <functional>
#include <map>
#include <random>
#include <set>
#include <thread>
#include <utility>

#include "fake_calls.hpp"
#include "fake_wires.hpp"
#include "fiber.hpp"
#include "runtime.hpp"

namespace fake_nccl {
namespace {

using pycomm::nccl::NcclComm;
using pycomm::nccl::NcclData;
using pycomm::nccl::NcclId;
using pycomm::nccl::NcclOp;
using pycomm::nccl::NcclQueue;
using pycomm::nccl::NcclResult;

// Of a call: two communicators fill a device, unless their number of blocks is limited.
constexpr unsigned kBlocks = 4, kThreadsOfBlock = 512;

std::atomic<int> waiting = 0;
std::atomic<long> longest_delay_us = 0;

// Ranks that call late: a call waits for a random time, as the test asks.
void delay() {
  const long most = longest_delay_us;
  thread_local std::minstd_rand random(std::random_device{}());
  if (most > 0)
    std::this_thread::sleep_for(
        std::chrono::microseconds(std::uniform_int_distribution<long>(0, most)(random)));
}

struct Comm {
  Comm(int size, const NcclId& named, int rank, pycomm::nccl::NcclOptions options)
      : wires(size, rank),
        id(named),
        blocking(options.blocking),
        ctas(options.max_ctas > 0 ? static_cast<unsigned>(options.max_ctas) : kBlocks) {
    cudaGetDevice(&device);
  }
  Lock mutex;    // guards all below but `aborted`, `connector` and `meeting`
  Lock meeting;  // of the thread in wires.meet()
  Wires wires;
  const NcclId id;
  const bool blocking;
  const unsigned ctas;  // thread blocks of a call
  int device = 0;
  bool connecting = true, busy = false;
  int splits = 0;
  std::shared_ptr<Comm> child;        // of the last split
  NcclComm** child_handle = nullptr;  // to be set when the child is connected
  uint64_t issued = 0, finished = 0, collectives = 0;
  std::set<cudaStream_t> streams;                         // of calls
  std::shared_ptr<int> graphs = std::make_shared<int>();  // captured calls own it too
  NcclResult error = NcclResult::success;
  std::string message;
  std::atomic<bool> aborted{false};
  std::thread connector;

  void connect() {
    connector = std::thread([this] {
      try {
        wires.connect(id, device, [this] { return aborted.load(); });
        const std::lock_guard lock(mutex);
        connecting = false;
      } catch (const Failed& failed) {
        const std::lock_guard lock(mutex);
        connecting = false;
        fail(failed);
      }
    });
  }
  uint64_t number() const { return std::hash<std::string>()(id.bytes.data()); }
  void cut() {
    forget_order(number());
    aborted = true;
    if (connector.joinable()) connector.join();
    const std::lock_guard met(meeting);  // its thread sees the flag
    wires.end_meetings();
    const std::lock_guard lock(mutex);
    wires.hang_up();
    if (child) child->aborted = true;  // the flag that they share
    if (child_handle != nullptr) child->cut();
  }
  bool in_graphs() const { return graphs.use_count() > 1; }
  // As NCCL waits at the end of a communicator, even at an abort.
  void wait_for_streams_and_graphs() {
    for (cudaStream_t const stream : streams) emulator::finish(stream);
    while (in_graphs()) std::this_thread::sleep_for(std::chrono::milliseconds(1));  // no event
  }

  void fail(const Failed& failed) {
    forget_order(number());
    error = failed.result;
    message = failed.what();
    wires.hang_up();
  }
  // Connects to the ranks of these calls, which wait for each other at the first calls.
  void meet(const std::vector<Call>& calls) {
    std::set<int> for_messages, for_collectives;
    for (const Call& call : calls)
      if (call.header.kind == Kind::message)
        for_messages.insert(call.peer);
      else
        for (int peer = 0; peer < wires.size(); ++peer)
          if (peer != wires.rank()) for_collectives.insert(peer);
    const auto given_up = [this] { return aborted.load(); };
    const std::lock_guard lock(meeting);
    const struct Waiting {
      Waiting() { ++waiting; }
      ~Waiting() { --waiting; }
    } counted;
    wires.meet(for_messages, true, given_up);
    wires.meet(for_collectives, false, given_up);
  }
  // Numbers the collectives in the order of the calls.
  void note_order(std::vector<Call>& calls) {
    for (Call& call : calls) {
      if (call.header.kind == Kind::message) continue;
      const Launched now{number(), ++collectives};
      for (int peer = 0; peer < wires.size(); ++peer)
        call.before.push_back(
            peer == wires.rank() ? now : exchange_last({getpid(), device}, wires.place(peer), now));
    }
  }
  bool in_progress() const { return connecting || child_handle != nullptr; }
};

// As NCCL does: the device of the communicator, and then the thread's own again.
class OnDevice {
 public:
  explicit OnDevice(int device) {
    cudaGetDevice(&before_);
    cudaSetDevice(device);
  }
  ~OnDevice() { cudaSetDevice(before_); }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  int before_ = 0;
};

}  // namespace

struct FakeNccl::State : std::enable_shared_from_this<State> {
  Lock mutex;
  std::map<NcclComm*, std::shared_ptr<Comm>> live;
  Counts counts;
  std::string last_error;

  NcclResult refuse(NcclResult result, const std::string& why) {
    const std::lock_guard lock(mutex);
    last_error = why;
    return result;
  }
  std::shared_ptr<Comm> find(NcclComm* handle) {
    const std::lock_guard lock(mutex);
    const auto found = live.find(handle);
    return found == live.end() ? nullptr : found->second;
  }
  std::shared_ptr<Comm> take(NcclComm* handle) {
    const std::lock_guard lock(mutex);
    const auto node = live.extract(handle);
    return node.empty() ? nullptr : node.mapped();
  }
  NcclResult gone() {
    return refuse(NcclResult::invalid_argument, "the communicator was destroyed or aborted");
  }
  NcclResult add(Call call, NcclQueue queue);
  NcclResult flush();
  NcclResult issue(const std::shared_ptr<Comm>& comm, std::vector<Call> calls, void* stream);
  void count(const std::vector<Call>& calls);
};

namespace {

// A group under construction, of this thread.
struct Noted {
  Call call;
  NcclQueue queue;
};
thread_local int depth = 0;
thread_local std::vector<Noted> noted;

}  // namespace

void FakeNccl::State::count(const std::vector<Call>& calls) {
  const std::lock_guard lock(mutex);
  ++counts.groups;
  for (const Call& call : calls) {
    if (call.header.kind != Kind::message) {
      ++counts.collectives;
      continue;
    }
    ++(call.sends ? counts.sends : counts.receives);
    if (call.sends) counts.bytes_sent += bytes_of(call);
    const void* const at = call.sends ? call.data.in : call.data.out;
    counts.misaligned += reinterpret_cast<uintptr_t>(at) % 16 != 0;
  }
}

NcclResult FakeNccl::State::add(Call call, NcclQueue queue) {
  const auto comm = find(queue.comm);
  if (!comm) return gone();
  const int peer = call.header.kind == Kind::message ? call.peer : call.header.root;
  if (peer < 0 || peer >= comm->wires.size())
    return refuse(NcclResult::invalid_argument, "there is no rank " + std::to_string(peer));
  if (call.header.kind == Kind::message && peer == comm->wires.rank())
    return refuse(NcclResult::invalid_usage, "a rank does not send to itself here");
  noted.push_back({call, queue});
  return depth > 0 ? NcclResult::success : flush();
}

NcclResult FakeNccl::State::flush() {
  const std::vector<Noted> all = std::exchange(noted, {});
  std::map<NcclComm*, std::pair<void*, std::vector<Call>>> by_comm;
  for (const Noted& one : all) {
    auto& [stream, calls] = by_comm[one.queue.comm];
    if (!calls.empty() && stream != one.queue.stream)
      return refuse(NcclResult::invalid_usage, "one stream for each communicator of a group");
    stream = one.queue.stream;
    calls.push_back(one.call);
  }
  for (auto& [handle, batch] : by_comm) {
    const auto comm = find(handle);
    const NcclResult result = comm ? issue(comm, std::move(batch.second), batch.first) : gone();
    if (result != NcclResult::success) return result;
  }
  return NcclResult::success;
}

NcclResult FakeNccl::State::issue(const std::shared_ptr<Comm>& comm, std::vector<Call> calls,
                                  void* stream) {
  delay();
  const OnDevice on(comm->device);
  auto* const queue = static_cast<cudaStream_t>(stream);
  cudaStreamCaptureStatus capture{};
  cudaStreamIsCapturing(queue, &capture);
  const bool counted = capture == cudaStreamCaptureStatusNone;
  {
    const std::lock_guard lock(comm->mutex);
    if (comm->error != NcclResult::success) return refuse(comm->error, comm->message);
    if (comm->connecting || !comm->blocking)
      return refuse(NcclResult::invalid_usage, "in progress, or not blocking");
    if (counted) ++comm->issued;
    if (counted) comm->streams.insert(queue);
    if (counted) comm->note_order(calls);
  }
  try {
    comm->meet(calls);
  } catch (const Failed& failed) {
    const std::lock_guard lock(comm->mutex);
    if (counted) ++comm->finished;
    if (!comm->aborted) comm->fail(failed);
    return refuse(failed.result, failed.what());
  }
  // A graph runs copies of this, each of which begins anew.
  const auto run = [self = shared_from_this(), comm, counted, calls = std::move(calls),
                    graph = counted ? nullptr : comm->graphs,
                    running = std::shared_ptr<Running>()]() mutable {
    const std::lock_guard lock(comm->mutex);
    bool over = comm->aborted || comm->error != NcclResult::success;
    if (!over && !running && comm->busy) return false;  // one at a time, as the device runs them
    try {
      if (!over && !running) {
        running = std::make_shared<Running>(calls, comm->wires);
        comm->busy = true;
        self->count(calls);
      }
      over = over || running->step(comm->wires);
    } catch (const Failed& failed) {
      if (!comm->aborted) comm->fail(failed);
      over = true;
    }
    if (!over) return false;
    if (running) comm->busy = false;
    running = nullptr;
    if (counted) ++comm->finished;
    return true;
  };
  const emulator::Occupies occupies{.threads = comm->ctas * kThreadsOfBlock};
  if (emulator::enqueue_polled(queue, run, occupies) != cudaSuccess) return NcclResult::cuda_error;
  return NcclResult::success;
}

int waiting_calls() { return waiting; }
void delay_calls(std::chrono::microseconds most) { longest_delay_us = most.count(); }

FakeNccl::FakeNccl() : state_(std::make_shared<State>()) {}

FakeNccl::~FakeNccl() {
  std::vector<NcclComm*> left;
  for (const auto& [handle, comm] : state_->live) left.push_back(handle);
  for (NcclComm* handle : left) state_->take(handle)->cut();
}

Counts FakeNccl::take_counts() {
  const std::lock_guard lock(state_->mutex);
  return std::exchange(state_->counts, {});
}

std::string FakeNccl::error_string(NcclResult result) {
  constexpr std::array kTexts{"no error",
                              "unhandled cuda error",
                              "unhandled system error",
                              "internal error",
                              "invalid argument",
                              "invalid usage",
                              "remote process exited or there was a network error",
                              "NCCL operation in progress",
                              "timeout"};
  return kTexts.at(static_cast<size_t>(result));
}

std::string FakeNccl::last_error() {
  const std::lock_guard lock(state_->mutex);
  return state_->last_error;
}

NcclResult FakeNccl::get_unique_id(NcclId& id) {
  std::random_device random;
  id = {};
  for (size_t i = 0; i < 32; i += 8)
    std::snprintf(id.bytes.data() + i, 9, "%08x", static_cast<unsigned>(random()));
  return NcclResult::success;
}

NcclResult FakeNccl::comm_init_rank(NcclComm*& handle, int size, const NcclId& id, int rank,
                                    pycomm::nccl::NcclOptions options) {
  if (size < 1 || rank < 0 || rank >= size)
    return state_->refuse(NcclResult::invalid_argument, "rank or size cannot be");
  const auto comm = std::make_shared<Comm>(size, id, rank, options);
  handle = reinterpret_cast<NcclComm*>(comm.get());
  {
    const std::lock_guard lock(state_->mutex);
    state_->live[handle] = comm;
  }
  comm->connect();
  if (!options.blocking) return NcclResult::in_progress;
  comm->connector.join();
  return comm->error == NcclResult::success ? comm->error
                                            : state_->refuse(comm->error, comm->message);
}

NcclResult FakeNccl::comm_split(NcclComm* handle, int rank, NcclComm*& child,
                                pycomm::nccl::NcclOptions options) {
  const auto parent = state_->find(handle);
  if (!parent) return state_->gone();
  const OnDevice on(parent->device);
  const std::lock_guard lock(parent->mutex);
  if (parent->error != NcclResult::success) return state_->refuse(parent->error, parent->message);
  if (parent->in_progress() || parent->blocking)
    return state_->refuse(NcclResult::invalid_usage, "in progress, or blocking");
  NcclId id = parent->id;
  std::snprintf(id.bytes.data() + 32, 16, "-%d", ++parent->splits);
  child = nullptr;
  parent->child = std::make_shared<Comm>(parent->wires.size(), id, rank, options);
  parent->child_handle = &child;
  parent->child->connect();
  return NcclResult::in_progress;
}

NcclResult FakeNccl::comm_destroy(NcclComm* handle) {
  const auto comm = state_->find(handle);
  if (!comm) return state_->gone();
  {
    const std::lock_guard lock(comm->mutex);
    if (comm->in_progress() || comm->issued != comm->finished)
      return state_->refuse(NcclResult::invalid_usage, "the communicator is not through");
  }
  return comm_abort(handle);
}

NcclResult FakeNccl::comm_abort(NcclComm* handle) {
  const auto comm = state_->take(handle);
  if (!comm) return state_->gone();
  comm->cut();
  comm->wait_for_streams_and_graphs();
  return NcclResult::success;
}

NcclResult FakeNccl::comm_async_error(NcclComm* handle, NcclResult& error) {
  const auto comm = state_->find(handle);
  if (!comm) return state_->gone();
  const std::lock_guard lock(comm->mutex);
  if (comm->child_handle != nullptr) {
    const std::lock_guard both(comm->child->mutex);
    if (!comm->child->connecting) {
      NcclComm*& child = *std::exchange(comm->child_handle, nullptr);
      if (comm->child->error != NcclResult::success)
        comm->fail(Failed(comm->child->error, comm->child->message));
      child = reinterpret_cast<NcclComm*>(comm->child.get());
      const std::lock_guard all(state_->mutex);
      state_->live[child] = comm->child;
    }
  }
  error = comm->error;
  if (error != NcclResult::success)
    return (void)state_->refuse(error, comm->message), NcclResult::success;
  if (comm->in_progress()) error = NcclResult::in_progress;
  return NcclResult::success;
}

NcclResult FakeNccl::group_start() { return ++depth, NcclResult::success; }
NcclResult FakeNccl::group_end() {
  if (depth == 0) return state_->refuse(NcclResult::invalid_usage, "no group was started");
  return --depth > 0 ? NcclResult::success : state_->flush();
}

NcclResult FakeNccl::send(NcclData d, int peer, NcclQueue q) {
  return state_->add({d, {Kind::message, d.dtype, {}, 0, d.count}, peer, true}, q);
}
NcclResult FakeNccl::recv(NcclData d, int peer, NcclQueue q) {
  return state_->add({d, {Kind::message, d.dtype, {}, 0, d.count}, peer, false}, q);
}
NcclResult FakeNccl::all_reduce(NcclData d, NcclOp op, NcclQueue q) {
  return state_->add({d, {Kind::all_reduce, d.dtype, op, 0, d.count}, 0, false}, q);
}
NcclResult FakeNccl::all_gather(NcclData d, NcclQueue q) {
  return state_->add({d, {Kind::all_gather, d.dtype, {}, 0, d.count}, 0, false}, q);
}
NcclResult FakeNccl::reduce_scatter(NcclData d, NcclOp op, NcclQueue q) {
  return state_->add({d, {Kind::reduce_scatter, d.dtype, op, 0, d.count}, 0, false}, q);
}
NcclResult FakeNccl::broadcast(NcclData d, int root, NcclQueue q) {
  return state_->add({d, {Kind::broadcast, d.dtype, {}, root, d.count}, 0, false}, q);
}

}  // namespace fake_nccl
