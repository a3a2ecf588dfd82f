#include "group/host_group.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <thread>
#include <utility>
#include <vector>

#include "collectives/choose.h"
#include "group/check.h"

namespace pycomm::group {
namespace {

// Longer than a round trip between two processors (about 1 us), but short, because spinning slows
// other processes: a small all_reduce of 2 ranks takes 5 to 8 us with a limit of 20, 50 or 200 us
// on an idle machine, but 110, 180 and 400 us beside a busy process (benchmarks/results/spin.json).
constexpr std::chrono::microseconds kSpin{20};

// A send of at most this size is copied at once, and a receive is left to the thread that waits for
// it: one frame, which fits an empty ring between two ranks.
constexpr size_t kSmallMessageBytes = transport::kSegmentBytes;

engine::EngineOptions engine_options(const ConnectOptions& options, const bootstrap::Mesh& mesh,
                                     engine::PeerConnector* connector) {
  engine::EngineOptions engine{.rank = options.rank,
                               .names = {},
                               .interrupted = options.interrupted,
                               .connector = connector,
                               .thread_multiple = options.thread_multiple};
  for (size_t i = 0; i < mesh.members.size(); ++i)
    engine.names.push_back(bootstrap::name_of(static_cast<int>(i), mesh.members[i]));
  const auto here = std::ranges::count(mesh.hosts, mesh.hosts[static_cast<size_t>(options.rank)]);
  // Spin only if each rank has a processor: otherwise spinning delays the awaited rank.
  static const auto processors = static_cast<long>(std::thread::hardware_concurrency());
  if (here <= processors) engine.spin = kSpin;
  // Threads of one process fail together and need no heartbeat.
  const bool alone = std::ranges::all_of(mesh.members, [](const Member& member) {
    return member.transport == "self" || member.transport == "local";
  });
  if (!alone) engine.heartbeat = options.heartbeat;
  const int64_t mine = mesh.members[static_cast<size_t>(options.rank)].pid;
  for (const Member& member : mesh.members)  // ranks of one process end together
    engine.pids.push_back(member.visible && member.pid != mine ? member.pid : 0);
  return engine;
}

// The slowest transport decides: if one pair needs it, every rank has such a pair.
collectives::Thresholds thresholds_of(const bootstrap::Mesh& mesh) {
  const auto uses = [&](std::string_view name) {
    return std::ranges::count(mesh.members, name, &Member::transport) > 0;
  };
  const std::string_view by = uses("tcp") ? "tcp" : uses("shm") ? "shm" : "local";
  const auto found = std::ranges::find(mesh.tuned, by, &bootstrap::TunedThresholds::transport);
  return found == mesh.tuned.end() ? collectives::Thresholds{} : found->thresholds;
}

// Messages on devices have no bytes here.
std::vector<engine::MessageRequest> requests_of(std::span<const Call> calls, int rank) {
  std::vector<engine::MessageRequest> requests;
  for (const Call& call : calls) {
    const bool on_device = call.device.agreement;
    if (is_plan(call.operation) || call.peer == kAnySource ||
        on_device != calls.front().device.agreement)
      throw InvalidArgument(
          "several messages at once must be send and recv calls, and each recv needs an explicit "
          "source rank",
          {.op = std::string(name_of(call.operation)), .rank = rank});
    const size_t bytes = on_device ? 0 : call.count * bytes_of(call.dtype);
    requests.push_back(
        {.peer = call.peer,
         .signature = signature_of(call, on_device ? call.algorithm : Algorithm::direct),
         .sends = call.operation == Operation::send,
         .out = {static_cast<const std::byte*>(call.input), bytes},
         .into = {static_cast<std::byte*>(call.output), bytes}});
  }
  return requests;
}

template <size_t kSize>
void put(std::array<char, kSize>& into, const std::string& text) {
  std::copy_n(text.begin(), std::min(text.size(), kSize - 1), into.begin());
}

observe::FlightRecorderHead head_of(const ConnectOptions& options, const bootstrap::Mesh& mesh) {
  const auto me = static_cast<size_t>(options.rank);
  observe::FlightRecorderHead head;
  head.steady_ns = observe::nanoseconds_of(Clock::now());
  head.wall_ns =
      std::chrono::nanoseconds(std::chrono::system_clock::now().time_since_epoch()).count();
  head.id = mesh.id;
  head.pid = mesh.members[me].pid;
  head.rank = options.rank;
  head.size = options.size;
  put(head.name, options.name);
  put(head.host, mesh.members[me].host);
  put(head.host_id, mesh.hosts[me]);
  return head;
}

GroupInfo info_of(const ConnectOptions& options, const bootstrap::Mesh& mesh,
                  std::vector<int> ranks) {
  const auto& hosts = mesh.hosts;
  const std::string& here = hosts[static_cast<size_t>(options.rank)];
  GroupInfo info{.rank = options.rank,
                 .size = options.size,
                 .name = options.name,
                 .members = mesh.members,
                 .ranks = std::move(ranks),
                 .hosts = {},
                 .encrypted = options.encrypt,
                 .reproducible = options.reproducible,
                 .thread_multiple = options.thread_multiple};
  info.local_size = static_cast<int>(std::ranges::count(hosts, here));
  info.local_rank = static_cast<int>(std::count(hosts.begin(), hosts.begin() + options.rank, here));
  std::vector<std::string> known;
  for (const std::string& host : hosts) {
    const auto found = std::ranges::find(known, host);
    info.hosts.push_back(static_cast<int>(found - known.begin()));
    if (found == known.end()) known.push_back(host);
  }
  info.host_count = static_cast<int>(known.size());
  return info;
}

// The memory that the ranks of this host share; null if there is none or this rank is alone.
std::unique_ptr<shared::SharedMemoryRegion> region_of(bootstrap::Mesh& mesh, int local_rank) {
  std::vector<std::shared_ptr<shared::Segment>> segments;
  std::vector<int> here;
  for (size_t i = 0; i < mesh.memories.size(); ++i) {
    const auto& memory = mesh.memories[i];
    if (memory == nullptr) continue;
    segments.emplace_back(memory, reinterpret_cast<shared::Segment*>(memory.get()));
    here.push_back(static_cast<int>(i));
  }
  if (here.size() < 2) return nullptr;
  auto region = std::make_unique<shared::SharedMemoryRegion>(std::move(segments), std::move(here),
                                                             local_rank);
  if (!mesh.heaps.empty()) region->set_heaps(std::move(mesh.heaps));
  return region;
}

// A receive on the host; an agreement about one on devices is a call like others.
bool is_receive(const Call& call) {
  return call.operation == Operation::recv && !call.device.agreement;
}

engine::Awaited awaited(const CallRunner& runner, PreparedCall& receive) {
  runner.prepare(receive);
  const Call& call = receive.call;
  return {.from = call.peer == kAnySource ? engine::kAnyPeer : call.peer,
          .signature = receive.job.header,
          .into = {static_cast<std::byte*>(call.output), call.count * bytes_of(call.dtype)}};
}

// Whether the call needs no turn: a message, if several threads may call at once.
bool runs_beside(const Call& call, const ConnectOptions& options) {
  return options.thread_multiple && !is_plan(call.operation) && !call.device.agreement;
}

// The shared memory that the call used; null: none, or another thread may use it now.
const shared::SharedMemoryRegion* memory_of(const PreparedCall& prepared,
                                            const CallRunner& runner) {
  return is_plan(prepared.call.operation) ? runner.region() : nullptr;
}

// Behind the asynchronous messages that wait.
AgreedCalls start_all(Group& group, std::span<const Call> calls) {
  std::vector<std::shared_ptr<Work>> started;
  for (const Call& call : calls) started.push_back(group.start(call, {}));
  std::exception_ptr error;
  for (const auto& one : started) {
    try {
      one->wait();
    } catch (...) {
      if (!error) error = std::current_exception();
    }
  }
  if (error) std::rethrow_exception(error);
  return {};
}

}  // namespace

HostGroup::HostGroup(ConnectOptions options, bootstrap::Mesh mesh, std::vector<int> ranks)
    : options_(std::move(options)),
      info_(info_of(options_, mesh, std::move(ranks))),
      timeout_(options_.timeout),
      id_(mesh.id),
      connector_(std::move(mesh.connector)),
      engine_(std::move(mesh.channels), engine_options(options_, mesh, connector_.get())),
      runner_(engine_, info_, thresholds_of(mesh), region_of(mesh, info_.local_rank),
              !mesh.memories.empty() && info_.host_count > 1),
      log_(head_of(options_, mesh), options_.recorder, options_.thread_multiple),
      worker_(options_.interrupted,
              {.wait = [this](auto pending) { return receive_any(pending); },
               .suspend = [this] { engine_.stop().suspend(); },
               .resume = [this] { engine_.stop().resume(); }},
              options_.thread_multiple),
      messages_(options_.interrupted, worker_.receiver(), options_.thread_multiple) {
  options_.tuned = std::move(mesh.tuned);  // for split()
  // Heaps exist on a single host only.
  if (runner_.region() != nullptr && runner_.region()->has_heaps()) heap_ = std::move(mesh.heap);
  if (options_.thread_multiple) return;
  engine_.messenger().set_waiting([this] {
    std::vector<engine::Awaited> all;
    for (const PendingReceive& one : worker_.waiting_receives()) {
      PreparedCall prepared{.call = one.call, .deadline = one.deadline};
      all.push_back(awaited(runner_, prepared));
    }
    return all;
  });
}

HostGroup::~HostGroup() { close(); }

// Returns the reducer of a call that adds, else null.
const kernels::Reducer* HostGroup::check(const Call& call) const {
  // The device group checked it and chose the algorithm, unless it is the first call on devices.
  if (call.device.agreement && call.algorithm != Algorithm::automatic) return nullptr;
  const kernels::Reducer* const reducer = check_call(call, info_.rank, info_.size);
  runner_.check(call);
  return reducer;
}

void HostGroup::run(const Call& call) {
  const bool beside = runs_beside(call, options_);
  // As a started one, a large receive takes its message while a send runs.
  const auto large = [&] { return call.count * bytes_of(call.dtype) > kSmallMessageBytes; };
  if (is_receive(call) ? (beside ? messages_.receives()
                                 : worker_.receives() || (large() && worker_.runs_calls()))
                       : beside && messages_.runs_calls())
    return start(call, {})->wait();  // keeps the order
  const kernels::Reducer* const reducer = check(call);
  if (beside) return execute({.call = call, .deadline = Deadline(limit_of(call))});
  const Worker::Turn turn = take_turn(call);
  execute({.call = call, .job = {.reducer = reducer}, .deadline = {turn.since(), limit_of(call)}});
}

std::shared_ptr<Work> HostGroup::start(const Call& call,
                                       std::function<void(std::exception_ptr)> then) {
  const auto body = [this, call, reducer = check(call)] {
    execute({.call = call, .job = {.reducer = reducer}, .deadline = Deadline(limit_of(call))});
  };
  const size_t bytes = call.count * bytes_of(call.dtype);
  const bool small = bytes <= kSmallMessageBytes;
  Worker& worker = runs_beside(call, options_) ? messages_ : worker_;
  if (is_receive(call))
    return worker.start_receive({call, Deadline(limit_of(call))}, small, body, std::move(then));
  if (small && call.operation == Operation::send && !call.device.agreement) {
    const auto can = [&] { return engine_.can_send_at_once(call.peer, bytes); };
    if (auto sent = worker.run_at_once(can, body, then)) return sent;
  }
  return worker.start(body, std::move(then));
}

// Errors name the receive that times out first.
std::optional<Worker::Completed> HostGroup::receive_any(
    std::span<const PendingReceive* const> pending) {
  std::vector<PreparedCall> calls;
  std::vector<engine::Awaited> receives;
  engine::Received received;
  for (const PendingReceive* const one : pending) {
    PreparedCall& prepared =
        calls.emplace_back(PreparedCall{.call = one->call, .deadline = one->deadline});
    receives.push_back(awaited(runner_, prepared));
    if (one->deadline.left() < pending[received.index]->deadline.left())
      received.index = calls.size() - 1;
  }
  const Deadline first = calls[received.index].deadline;
  std::exception_ptr error;
  try {
    engine_.check_usable();
    if (!engine_.messenger().receive_any(receives, received, first)) return std::nullopt;
    if (int* const source = pending[received.index]->call.source) *source = received.from;
    const PreparedCall& one = calls[received.index];
    log_.end(log_.begin(one), one, engine_.traffic(), nullptr, false);
  } catch (...) {
    const PreparedCall& one = calls[received.index];
    if (!options_.thread_multiple)  // otherwise another thread may use the mailbox now
      engine_.messenger().detach(static_cast<const std::byte*>(one.call.output));
    error = log_failure(log_.begin(one), one);
  }
  return Worker::Completed{received.index, error};
}

AgreedCalls HostGroup::exchange(std::span<const Call> calls, MessageProgress* progress) {
  for (const Call& call : calls) (void)check(call);
  const auto requests = requests_of(calls, info_.rank);
  if (calls.empty()) return {};
  const Call& first = calls.front();
  AgreedCalls found;
  std::vector<size_t> agreed;
  const bool beside = runs_beside(first, options_) && progress == nullptr;
  if (beside && (messages_.runs_calls() || messages_.receives())) return start_all(*this, calls);
  try {
    const auto run = [&](Clock::time_point since) {
      execute({.call = first,
               .deadline = {since, limit_of(first)},
               .messages = requests,
               .agreed = first.device.agreement ? &agreed : nullptr,
               .progress = progress});
    };
    if (beside) {
      run(Clock::now());
    } else {
      const Worker::Turn turn = take_turn(first);
      run(turn.since());
    }
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::mismatch || !first.device.agreement) throw;
    found.mismatch = error;
  }
  for (const size_t index : agreed) found.agreed.push_back(calls[index]);
  return found;
}

void HostGroup::run_together(const std::function<void()>& body, std::chrono::nanoseconds limit) {
  const Worker::Turn turn = worker_.take_turn(limit);
  const Worker::ReentrantTurn reentrant(worker_);
  body();
}

Worker::Turn HostGroup::take_turn(const Call& call) {
  const auto limit = limit_of(call);
  try {
    return worker_.take_turn(limit);
  } catch (const Timeout& late) {  // the peers made this call, so the group cannot continue
    const std::string op(name_of(call.operation)), running = engine_.status().current_call;
    const std::string text = op + ": " + late.what() + (running.empty() ? "" : ", " + running);
    engine_.stop().request(text);
    throw Timeout(
        text,
        {.op = op, .rank = info_.rank, .elapsed_s = std::chrono::duration<double>(limit).count()});
  }
}

void HostGroup::execute(PreparedCall prepared) {
  engine_.check_usable();  // before this rank publishes the call in shared memory
  runner_.prepare(prepared);
  const uint64_t number = log_.begin(prepared);
  try {
    runner_.run(prepared);
  } catch (...) {
    std::rethrow_exception(log_failure(number, prepared));
  }
  log_.end(number, prepared, engine_.traffic(), memory_of(prepared, runner_), false);
}

// The call failed with the current exception. Returns it with the place of the flight record.
std::exception_ptr HostGroup::log_failure(uint64_t number, const PreparedCall& prepared) {
  log_.end(number, prepared, engine_.traffic(), memory_of(prepared, runner_), true);
  try {
    throw;
  } catch (const Error& error) {
    const std::string where = log_.record_failure(error);
    if (where.empty()) return std::current_exception();
    return std::make_exception_ptr(Error(error.kind(), error.what() + where, error.fields()));
  } catch (...) {  // out of memory, or from Python
    return std::current_exception();
  }
}

Status HostGroup::status() const {
  Status now = engine_.status();
  now.peers.resize(static_cast<size_t>(info_.size));  // none are known before the first call
  return now;
}

void HostGroup::set_timeout(std::chrono::nanoseconds timeout) {
  if (timeout.count() <= 0) throw InvalidArgument("invalid timeout: it must be longer than 0 s");
  timeout_ = timeout;
}

void HostGroup::complete(std::chrono::microseconds round_trip) {
  runner_.adapt_to(round_trip);
  if (engine_.heartbeat_interval().count() == 0) return;
  try {
    heartbeat_.start(engine_.heartbeat_interval(), [this] {
      worker_.end_deferral();  // of a receive that the caller does not wait for
      messages_.end_deferral();
      return engine_.heartbeat();
    });
  } catch (const Error& error) {  // peers would wait for a rank that sends no heartbeat
    engine_.fail(error);
    throw;
  }
}

void HostGroup::close_after_peers(std::chrono::nanoseconds wait) noexcept {
  if (worker_.busy() || messages_.busy() || engine_.posted().busy())
    engine_.stop().request("it was closed while a call ran");
  worker_.join();
  messages_.join();
  engine_.posted().join();
  heartbeat_.join();
  engine_.messenger().set_waiting({});
  engine_.leave(wait, options_.interrupted);
  log_.close();
}

void HostGroup::check_for_failures(std::chrono::nanoseconds limit) {
  std::vector<int> others(static_cast<size_t>(info_.size));
  std::iota(others.begin(), others.end(), 0);
  std::erase(others, info_.rank);
  engine_.check_for_failures(limit, others);
}

void HostGroup::abort(const std::string& reason) noexcept {
  engine_.stop().request(reason);  // ends the running call and those queued after it
  worker_.run_exclusive([&] {
    const GroupBroken error("the group was aborted: " + reason);
    engine_.fail(error);
    (void)log_.record_failure(error);
  });
  heartbeat_.join();
}

}  // namespace pycomm::group
